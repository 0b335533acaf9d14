"""The fake NVML library and the directories of one user."""

from support.engines import home
from support.fake_nvml import built, fake

__all__ = ["built", "fake", "home"]
