"""A newer unsigned bundle, or an old signed bundle that is pulled again, does not supersede a trusted one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.key import Key
from coldstart.artifacts.store import Store
from tools.bundles import provenance, publish
from tools.shell import Run

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError
from coldstart.models import inspection, keys, resolution
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.weights.prefetch import ask

OLD, NEW, LATER = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z"


@pytest.fixture
def model(home: Path) -> str:
    place = home / "my-model"
    place.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(place)


@pytest.fixture
def wanted(model: str) -> Key:
    return keys.compose(resolution.resolve(model), Arguments())


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _signed(store: Store, home: Path, wanted: Key, created: str, **kv: object) -> Bundle:
    return publish(
        store, home / "s", wanted, signer=sign.load_host_key(paths.state_dir()), created=created, **kv
    )


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


def test_pulled_unsigned_bundle_is_not_selected(
    run: Run, store: Store, home: Path, model: str, wanted: Key
) -> None:
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
    assert (
        isinstance(error, NoBundleError)
        and "not signed" in error.message
        and "--untrusted" in str(error.hint)
    )
    refused = run("serve", model, "--dry-run", code=3)
    assert "is not trusted" in refused.stderr
    assert not list(Cache.at().root.glob("vllm/*/modelinfos/*"))
    allowed = run("serve", model, "--dry-run", "--untrusted")
    assert "its sizes and weights plan are unverified" in allowed.stderr


@pytest.mark.parametrize("local", [True, False], ids=["same key", "nearest"])
def test_weights_of_untrusted_bundle_are_reported_unverified(
    local: bool, store: Store, model: str, wanted: Key
) -> None:
    """Weights that match a list of digests from an untrusted bundle are not verified."""
    plan = {"chunk": 16, "files": [{"name": "evil.safetensors", "size": 0, "chunks": [], "tensors": []}]}
    with store.open_draft(wanted) as draft:
        draft.add_json("weights", plan)
        draft.publish(provenance())
    (Path(model) / "model.safetensors").unlink(missing_ok=not local)
    if local:
        wanted = keys.compose(resolution.resolve(model), Arguments())
        with store.open_draft(wanted) as draft:
            draft.add_json("weights", plan)
            draft.publish(provenance())
    with pytest.raises(NoBundleError):
        ask.resolve(model, cache=Cache.at(), weights_from="http://127.0.0.1:1/w")
    asked = ask.resolve(model, cache=Cache.at(), weights_from="http://127.0.0.1:1/w", accepts=accept_any)
    assert asked.plan == plan and any("unverified" in note for note in asked.notes)


def test_pulled_older_bundle_is_reported_and_not_selected(
    run: Run, store: Store, home: Path, model: str, wanted: Key
) -> None:
    mine = _signed(store, home, wanted, NEW)
    done = run("pull", _elsewhere(home, wanted, OLD, signed=True))
    assert "is older than v1" in done.stderr
    assert [bundle.version for bundle in store.list_bundles()] == [1, 2] and _selected(model) == mine
    (note,) = inspection.look_up(model).notes
    assert "v2 was skipped in favor of v1: it was created earlier" in note
    run("prune", mine.ref)
    assert _selected(model) == store.find_by_reference("org/tiny:v2")


def test_newest_trusted_version_is_selected(
    run: Run, store: Store, home: Path, model: str, wanted: Key
) -> None:
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
    said = f"signature 1: its signer {stranger.fingerprint} is not a trusted key\n"
    assert said in unknown.stdout and "invalid" not in unknown.stdout
    assert "coldstart trust add FILE" in unknown.stderr
    maker = home / "maker.pem"
    maker.write_bytes(sign.load_public_pem(home / "stranger"))
    run("trust", "add", str(maker), "--name", "build-farm")
    known = run("trust", "why", "org/tiny:v3").stdout
    assert f"v3 is trusted: signed by {stranger.fingerprint}\n" in known


def test_cached_trust_ends_when_its_key_is_removed(store: Store, home: Path, wanted: Key) -> None:
    mine = _signed(store, home, wanted, OLD)
    assert inspection.trust(mine).ok and inspection.trust(mine).ok
    (record,) = (paths.state_dir() / "verdicts").iterdir()
    assert record.stat().st_mode & 0o077 == 0
    for key_file in sign.trust_dir(paths.state_dir()).glob("*.pub"):
        key_file.unlink()
    assert not inspection.trust(mine).ok
