"""Run the command line in a child process with separate cache, state and configuration."""

from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.engines import home
from tools.bundles import publish
from tools.command_line import run

from coldstart.system import paths
from coldstart.system.paths import Cache

__all__ = ["home", "run"]


@pytest.fixture
def bundle(home: Path) -> Bundle:
    """Publish the bundle org/tiny in the default store and create the host's signing key."""
    made = publish(Store(Cache.at().bundles), home / "scratch")
    sign.load_host_key(paths.state_dir())
    return made
