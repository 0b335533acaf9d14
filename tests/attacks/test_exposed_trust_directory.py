"""Keys that another user owns, can replace, read or place outside of the trust directory are refused."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import STRANGER
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import ExposedKeyError, InvalidNameError
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.shell import Run

from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.trust import trusted_keys

MODES = (0o770, 0o777, 0o1777, 0o720, 0o702, 0o2770)
root_alone = pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another user needs root")


@pytest.fixture
def signed(home: Path, tmp_path: Path) -> Bundle:
    bundle = publish(
        Store(Cache.at().bundles), tmp_path / "scratch", signer=sign.load_host_key(paths.state_dir())
    )
    assert inspection.trust(bundle).ok  # and is recorded
    return bundle


def _find_key() -> Path:
    (key,) = sign.trust_dir(paths.state_dir()).glob("host-*.pub")
    return key


PLACES: dict[str, Callable[[], Path]] = {
    "trust directory": lambda: sign.trust_dir(paths.state_dir()),
    "state directory": paths.state_dir,
    "key": _find_key,
}


def _is_refused(bundle: Bundle, place: Path, command: str) -> None:
    """Fail unless trust in `bundle` is refused with `place` and a hint that ends in `command`, recorded or not."""
    for _ in range(2):
        with pytest.raises(ExposedKeyError) as caught:
            inspection.trust(bundle)
        assert str(place) in caught.value.message
        assert str(caught.value.hint).endswith(f"{command} {shlex.quote(str(place))}`")
        for record in (paths.state_dir() / "verdicts").glob("*"):
            record.unlink()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_place_that_others_can_write_to_is_refused(signed: Bundle, place: str, mode: int) -> None:
    path = PLACES[place]()
    before = path.stat().st_mode & 0o7777
    path.chmod(mode)
    _is_refused(signed, path, "chmod go-w")
    if place != "key":
        for use in (trusted_keys.list_keys, lambda: sign.load_host_key(paths.state_dir())):
            with pytest.raises(ExposedKeyError):
                use()
    path.chmod(before)
    assert inspection.trust(signed).ok


@root_alone
@pytest.mark.parametrize("place", PLACES)
def test_place_of_another_user_is_refused(signed: Bundle, place: str) -> None:
    path = PLACES[place]()
    os.chown(path, STRANGER, STRANGER)
    _is_refused(signed, path, f"chown {os.getuid()}")
    os.chown(path, os.getuid(), os.getgid())
    assert inspection.trust(signed).ok


def test_link_to_a_key_that_others_can_replace_is_refused(signed: Bundle, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    key = _find_key()
    target = key.rename(shared / "key.pub")
    key.symlink_to(target)
    assert inspection.trust(signed).ok
    shared.chmod(0o777)
    _is_refused(signed, shared, "chmod go-w")
    shared.chmod(0o755)
    target.chmod(0o666)
    _is_refused(signed, target, "chmod go-w")


@root_alone
def test_link_into_a_sticky_directory_of_root_is_accepted(signed: Bundle, tmp_path: Path) -> None:
    key = _find_key()
    key.symlink_to(key.rename(tmp_path / "key.pub"))
    tmp_path.chmod(0o1777)
    ownership.require_unexposed(key, paths.state_dir())
    assert inspection.trust(signed).ok


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_signing_key_that_others_can_read_is_refused(signed: Bundle, mode: int) -> None:
    key = paths.state_dir() / "signing" / "host.pem"
    key.chmod(mode)
    with pytest.raises(ExposedKeyError) as caught:
        sign.load_host_key(paths.state_dir())
    assert str(key) in caught.value.message and str(caught.value.hint).endswith(f"{shlex.quote(str(key))}`")
    assert "chmod" in str(caught.value.hint)
    key.chmod(0o600)
    assert sign.load_host_key(paths.state_dir()).fingerprint


def test_commands_name_the_directory_and_the_chmod(run: Run, home: Path) -> None:
    run("trust", "list")
    trust = sign.trust_dir(paths.state_dir())
    trust.chmod(0o777)
    done = run("trust", "list", code=2)
    assert str(trust) in done.stderr and f"chmod go-w {shlex.quote(str(trust))}" in done.stderr


@pytest.mark.parametrize("name", ["../../x", "a/b", "/x", "..", ".hidden", "", "a\nb", "a" * 65, "-x"])
def test_trust_refuses_a_name_that_is_not_a_plain_file_name(name: str, tmp_path: Path) -> None:
    pem = sign.load_public_pem(tmp_path / "state")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidNameError):
        sign.add_trusted_key(tmp_path / "trust" / "deep", pem, name=name)
    assert sorted(tmp_path.rglob("*")) == before


def test_trust_add_writes_into_the_trust_directory_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_bytes(sign.load_public_pem(tmp_path / "other"))
    refused = run("trust", "add", str(tmp_path / "other.pem"), "--name", "../../x", code=None)
    assert refused.returncode == 2 and "invalid key name '../../x'" in refused.stderr
    assert not list(paths.state_dir().parent.rglob("x-*.pub"))
    run("trust", "add", str(tmp_path / "other.pem"), "--name", "build-host.2")
    assert list(sign.trust_dir(paths.state_dir()).glob("build-host.2-*.pub"))
