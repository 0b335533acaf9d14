"""The fake management library is a fixture of this room, and a user's own directories."""

from __future__ import annotations

from fake_nvml import built, fake
from support.engines import home

__all__ = ["built", "fake", "home"]
