"""The fake management library is a fixture of this room."""

from __future__ import annotations

from fake_nvml import built, fake

__all__ = ["built", "fake"]
