"""The fake NVML library and the directories of one user."""

from __future__ import annotations

from fake_nvml import built, fake
from support.engines import home

__all__ = ["built", "fake", "home"]
