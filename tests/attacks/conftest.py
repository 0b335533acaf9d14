"""Attacks run with a home of their own, the engine's fakes, and a second user of this machine."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.command_line import run

from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.paths import Cache
from tests.support.engines import fake_engine, home

__all__ = ["fake_engine", "home", "run"]
STRANGER = 64321
"""An unassigned user id; the kernel treats it like any other."""


@pytest.fixture
def signed(home: Path, tmp_path: Path) -> Bundle:
    """A bundle of this user's key, with a record that it is trusted."""
    signer = sign.load_host_key(paths.state_dir())
    bundle = publish(Store(Cache.at().bundles), tmp_path / "scratch", signer=signer)
    assert inspection.trust(bundle).is_trusted
    return bundle


@pytest.fixture
def stranger() -> Callable[[Callable[[], object]], object]:
    """stranger(act): what `act` returns when another user does it (OSError reads as None)."""
    if os.getuid() != 0:
        pytest.skip("a second user needs root: run these tests as root, or in a container")
    return _as_stranger


def _as_stranger(act: Callable[[], object]) -> object:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        found: object = None
        try:
            found = act()
        except OSError:
            found = None
        finally:
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)
