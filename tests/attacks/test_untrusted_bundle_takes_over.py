"""Untrusted bundles supersede no trusted one, and keys that another user could have placed are refused."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import STRANGER
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import ExposedKeyError, InvalidNameError
from coldstart.artifacts.key import Key
from coldstart.artifacts.store import Store
from tools import tiny_models
from tools.bundles import publish, publish_sections
from tools.command_line import Run

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError
from coldstart.models import inspection, keys, resolution
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.trust import trusted_keys
from coldstart.weights.prefetch import ask

OLD, NEW, LATER = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"


@pytest.fixture
def model(home: Path) -> str:
    return str(tiny_models.write_empty(home / "my-model", torch_dtype="float32"))


@pytest.fixture
def wanted(model: str) -> Key:
    return keys.compose_key(resolution.resolve(model), Arguments())


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _signed(store: Store, home: Path, wanted: Key, created: str, **kv: object) -> Bundle:
    signer = sign.load_host_key(paths.state_dir())
    return publish(store, home / "s", wanted, signer=signer, created=created, **kv)


def _elsewhere(home: Path, wanted: Key, created: str, signed: bool, name: str = "elsewhere") -> str:
    """Return the address of a directory with a bundle that was created elsewhere."""
    other = Store(home / name)
    made = (
        _signed(other, home, wanted, created, n=name)
        if signed
        else publish(other, home / "s", wanted, created=created, n=name)
    )
    return f"{other.root}@{made.digest}"


def _selected(model: str) -> Bundle | None:
    return inspection.look_up(model).bundle


def test_pulled_unsigned_is_not_selected(run: Run, store: Store, home: Path, model: str, wanted: Key) -> None:
    mine = _signed(store, home, wanted, OLD)
    done = run("pull", _elsewhere(home, wanted, LATER, signed=False))
    assert "no code in" in done.stderr and "will run" in done.stderr and len(store.list_bundles()) == 2
    assert _selected(model) == mine
    assert store.find_by_reference("org/tiny", trust=inspection.trust) == mine
    noted = inspection.look_up(model).notes
    assert noted == ("org/tiny:v2 was skipped in favor of v1: the bundle is not signed",)


def test_prune_removes_the_unsigned_bundle(run: Run, store: Store, home: Path, wanted: Key) -> None:
    mine = _signed(store, home, wanted, OLD)
    run("pull", _elsewhere(home, wanted, LATER, signed=False))
    (stranger,) = [bundle for bundle in store.list_bundles() if bundle != mine]
    planned = json.loads(run("prune", "--dry-run", "--format=json").stdout)
    assert planned["removed"] == [stranger.digest]
    run("prune")
    assert store.list_bundles() == [mine]


def test_only_unsigned_bundle_needs_untrusted_option(run: Run, home: Path, model: str, wanted: Key) -> None:
    run("pull", _elsewhere(home, wanted, LATER, signed=False))
    found = inspection.look_up(model)
    assert found.bundle is None and found.untrusted is not None
    error = inspection.build_miss_error(found)
    assert isinstance(error, NoBundleError)
    assert "not signed" in error.message
    assert "--untrusted" in str(error.hint)
    refused = run("serve", model, "--dry-run", code=3)
    assert "is not trusted" in refused.stderr
    assert not list(Cache.at().root.glob("vllm/*/modelinfos/*"))
    allowed = run("serve", model, "--dry-run", "--untrusted")
    assert "its sizes and weights plan are unverified" in allowed.stderr


@pytest.mark.parametrize("local", [True, False], ids=["same key", "nearest"])
def test_untrusted_weights_are_named_unverified(local: bool, store: Store, model: str, wanted: Key) -> None:
    """Weights that match a list of digests from an untrusted bundle are not verified."""
    plan = {"chunk": 16, "files": [{"name": "evil.safetensors", "size": 0, "chunks": [], "tensors": []}]}
    publish_sections(store, wanted, weights=plan)
    (Path(model) / "model.safetensors").unlink(missing_ok=not local)
    if local:
        wanted = keys.compose_key(resolution.resolve(model), Arguments())
        publish_sections(store, wanted, weights=plan)
    with pytest.raises(NoBundleError):
        ask.resolve_request(model, cache=Cache.at(), weights_from="http://127.0.0.1:1/w")
    asked = ask.resolve_request(
        model, cache=Cache.at(), weights_from="http://127.0.0.1:1/w", accepts=accept_any
    )
    assert asked.plan == plan and any("unverified" in note for note in asked.notes)


def test_pulled_older_is_not_selected(run: Run, store: Store, home: Path, model: str, wanted: Key) -> None:
    mine = _signed(store, home, wanted, NEW)
    done = run("pull", _elsewhere(home, wanted, OLD, signed=True))
    assert "is older than v1" in done.stderr
    assert [bundle.version for bundle in store.list_bundles()] == [1, 2] and _selected(model) == mine
    (note,) = inspection.look_up(model).notes
    assert "v2 was skipped in favor of v1: it was created earlier" in note
    run("prune", mine.ref)
    assert _selected(model) == store.find_by_reference("org/tiny:v2")


def test_newest_trusted_one_is_selected(run: Run, store: Store, home: Path, model: str, wanted: Key) -> None:
    _signed(store, home, wanted, OLD)
    run("pull", _elsewhere(home, wanted, NEW, signed=True))
    assert _selected(model) == store.find_by_reference("org/tiny:v2")


def test_trust_why_reports_the_reason(run: Run, store: Store, home: Path, wanted: Key) -> None:
    _signed(store, home, wanted, OLD)
    run("pull", _elsewhere(home, wanted, LATER, signed=False))
    good = run("trust", "why", "org/tiny:v1").stdout
    own = sign.load_host_key(paths.state_dir()).fingerprint
    assert f"v1 is trusted: signed by {own}\n" in good and f"signature 1: signed by {own}\n" in good
    listed = json.loads(run("trust", "why", "org/tiny:v1", "--format", "json").stdout)["signatures"]
    assert [(one["ok"], one["signer"]) for one in listed] == [(True, own)]
    bad = run("trust", "why", "org/tiny:v2", code=1)
    assert "not trusted: the bundle is not signed" in bad.stdout
    (home / "stranger").mkdir()
    stranger = sign.load_host_key(home / "stranger")
    other = Store(home / "third")
    made = publish(other, home / "s", wanted, signer=stranger, created=LATER, n="third")
    run("pull", f"{other.root}@{made.digest}")
    unknown = run("trust", "why", "org/tiny:v3", code=1)
    said = f"signature 1: the signing key {stranger.fingerprint} is not trusted\n"
    assert said in unknown.stdout and "invalid" not in unknown.stdout
    assert "coldstart trust add FILE" in unknown.stderr
    maker = home / "maker.pem"
    maker.write_bytes(sign.load_host_key(home / "stranger").public_pem)
    run("trust", "add", str(maker), "--name", "build-farm")
    known = run("trust", "why", "org/tiny:v3").stdout
    assert f"v3 is trusted: signed by {stranger.fingerprint}\n" in known


def test_cached_trust_ends_when_its_key_is_removed(store: Store, home: Path, wanted: Key) -> None:
    mine = _signed(store, home, wanted, OLD)
    assert inspection.trust(mine).is_trusted and inspection.trust(mine).is_trusted
    (record,) = (paths.state_dir() / "verdicts").iterdir()
    assert record.stat().st_mode & 0o077 == 0
    for key_file in sign.trust_dir(paths.state_dir()).glob("*.pub"):
        key_file.unlink()
    assert not inspection.trust(mine).is_trusted


MODES = (0o770, 0o777, 0o1777, 0o720, 0o702, 0o2770)
root_alone = pytest.mark.skipif(os.getuid() != 0, reason="giving a file to another user needs root")


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
    assert inspection.trust(signed).is_trusted


@root_alone
@pytest.mark.parametrize("place", PLACES)
def test_place_of_another_user_is_refused(signed: Bundle, place: str) -> None:
    path = PLACES[place]()
    os.chown(path, STRANGER, STRANGER)
    _is_refused(signed, path, f"chown {os.getuid()}")
    os.chown(path, os.getuid(), os.getgid())
    assert inspection.trust(signed).is_trusted


def test_link_to_a_key_that_others_can_replace_is_refused(signed: Bundle, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    key = _find_key()
    target = key.rename(shared / "key.pub")
    key.symlink_to(target)
    assert inspection.trust(signed).is_trusted
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
    assert inspection.trust(signed).is_trusted


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
    pem = sign.load_host_key(tmp_path / "state").public_pem
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidNameError):
        sign.add_trusted_key(tmp_path / "trust" / "deep", pem, name=name)
    assert sorted(tmp_path.rglob("*")) == before


def test_trust_add_writes_into_the_trust_directory_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_bytes(sign.load_host_key(tmp_path / "other").public_pem)
    refused = run("trust", "add", str(tmp_path / "other.pem"), "--name", "../../x", code=None)
    assert refused.returncode == 2 and "invalid key name '../../x'" in refused.stderr
    assert not list(paths.state_dir().parent.rglob("x-*.pub"))
    run("trust", "add", str(tmp_path / "other.pem"), "--name", "build-host.2")
    assert list(sign.trust_dir(paths.state_dir()).glob("build-host.2-*.pub"))
