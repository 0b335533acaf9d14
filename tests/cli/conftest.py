"""A command line with cache, state and configuration of its own, run in a child process."""

from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.command_line import home, run

from coldstart.system import paths
from coldstart.system.paths import Cache

__all__ = ["home", "run"]


@pytest.fixture
def bundle(home: Path) -> Bundle:
    """A signed bundle called org/tiny in the default store."""
    made = publish(Store(Cache.at().bundles), home / "scratch")
    sign.host_key(paths.state_dir())
    return made
