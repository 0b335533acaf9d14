"""Usable sections of a bundle become the plan; every other section becomes a reason."""

from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.engines import Publish
from tools.bundles import CODE, damage, publish_sections

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import fetch, prepare
from coldstart.models import inspection
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights

KV = {"bytes": 4096, "blocks": 2, "block_tokens": 16}
CANARY = {"prompt": [5, 6], "tokens": [7, 8]}


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(prepare, "read_available_memory", lambda: 8 << 30)


def prepare_plan(bundle: Bundle, model: ResolvedModel, *vllm_args: str) -> LaunchPlan:
    given = Arguments(vllm_args)
    lookup = BundleLookup(model, given, Cache.at(), bundle.key, bundle)
    source = fetch.choose_weights_source(lookup)
    return prepare.plan_with_bundle(lookup, bundle, source, trust=inspection.trust)


def reasons(plan: LaunchPlan) -> dict[str, str]:
    return {fallback.stage: fallback.reason for fallback in plan.fallbacks}


def test_complete_bundle_is_used(publish: Publish, model: ResolvedModel) -> None:
    identity = weights.compute_digest(weights.build_plan(model.path or Path()))
    infos = {"some.module.Model.json": '{"a": 1}'}
    bundle = publish(kv=KV, modelinfo={"canary": CANARY, "weights": identity, "vllm_modelinfos": infos})
    plan = prepare_plan(bundle, model, "--max-model-len", "9")
    assert plan.fallbacks == [] and plan.canary == CANARY
    assert plan.key == bundle.key_digest and plan.weights == identity
    assert plan.vllm_args[-4:] == ("--max-model-len", "9", "--kv-cache-memory-bytes", "4096")
    assert plan.vllm_args[:5] == ("--model", str(model.path), "--served-model-name", "tiny", str(model.path))
    unpacked = Path(plan.compile_dir or "")
    assert {str(p.relative_to(unpacked)): p.read_bytes() for p in unpacked.rglob("*") if p.is_file()} == CODE
    assert plan.env["TORCHINDUCTOR_CACHE_DIR"] == str(unpacked / "inductor")
    cached = Path(plan.env["VLLM_CACHE_ROOT"]) / "modelinfos" / "some.module.Model.json"
    assert cached.read_text() == '{"a": 1}' and Cache.at().root in cached.parents


def test_compiled_code_that_could_not_be_made_is_missing_for_that_reason(
    store: Store, model: ResolvedModel
) -> None:
    signer = sign.load_host_key(paths.state_dir())
    stages = {inspection.NOT_MADE: {"compile": "PicklingError"}}
    bundle = publish_sections(store, signer=signer, kv=KV, modelinfo={"canary": CANARY}, stages=stages)
    assert reasons(prepare_plan(bundle, model)) == {
        "compile": "the bundle has no compiled code: PicklingError"
    }


@pytest.mark.parametrize("section", ["kv", "modelinfo", "compile"])
def test_a_damaged_section_is_a_reason(publish: Publish, model: ResolvedModel, section: str) -> None:
    bundle = publish(kv=KV, modelinfo={"canary": CANARY})
    damage(bundle, section)
    plan = prepare_plan(bundle, model)
    assert list(reasons(plan)) == [section] and "[CS-DIGEST]" in reasons(plan)[section]
    assert "coldstart pull" in str(plan.fallbacks[0].hint)
    if section == "compile":
        assert plan.compile_dir is None and "TORCHINDUCTOR_CACHE_DIR" not in plan.env


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("kv", [1]),
        ("kv", {"bytes": "4096; rm"}),
        ("kv", {"bytes": -1}),
        ("kv", {"blocks": 1}),
        ("modelinfo", "text"),
        ("modelinfo", {"canary": "no", "vllm_modelinfos": [1]}),
        ("modelinfo", {"canary": {"prompt": [], "tokens": [1]}}),
        ("modelinfo", {"canary": {"prompt": ["a"], "tokens": [1]}}),
        ("modelinfo", {"canary": {"tokens": [1]}, "vllm_modelinfos": {"a.json": 3}}),
    ],
)
def test_bad_section_is_a_reason(publish: Publish, model: ResolvedModel, section: str, value: object) -> None:
    sound: dict[str, object] = {"kv": KV, "modelinfo": {}}
    plan = prepare_plan(publish(**sound | {section: value}), model)
    assert plan.canary is None and plan.compile_dir is not None
    assert ("--kv-cache-memory-bytes" in plan.vllm_args) == (section != "kv")
    assert section != "kv" or list(reasons(plan)) == ["kv"]


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "..", "", "a/b.json", ".hidden.json"])
def test_file_name_cannot_leave_the_directory(publish: Publish, model: ResolvedModel, name: str) -> None:
    before = {p for p in Cache.at().root.rglob("*.json") if p.is_file()}
    plan = prepare_plan(publish(kv=KV, modelinfo={"vllm_modelinfos": {name: "{}"}}), model)
    assert plan.fallbacks == []
    after = {p for p in Cache.at().root.rglob("*.json") if p.is_file() and p.parent.name != "weights"}
    assert after == before and not (Cache.at().root.parent / "evil.json").exists()


def test_canary_needs_the_same_weights(publish: Publish, model: ResolvedModel) -> None:
    bundle = publish(kv=KV, modelinfo={"canary": CANARY, "weights": "sha256:" + "0" * 64})
    assert (plan := prepare_plan(bundle, model)).canary is None and list(reasons(plan)) == ["canary"]


def test_too_small_kv_cache(publish: Publish, model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = publish(kv=KV, modelinfo={})
    monkeypatch.setattr(prepare, "read_available_memory", lambda: prepare.HEADROOM + 4095)
    plan = prepare_plan(bundle, model)
    assert "with headroom" in reasons(plan)["kv"] and "--kv-cache-memory-bytes" not in plan.vllm_args
    monkeypatch.setattr(prepare, "read_available_memory", lambda: prepare.HEADROOM + 4096)
    assert prepare_plan(bundle, model).vllm_args[-2:] == ("--kv-cache-memory-bytes", "4096")


def test_untrusted_modelinfo_is_not_written(publish: Publish, model: ResolvedModel, tmp_path: Path) -> None:
    """vLLM would use the file in every later start, and an untrusted canary token must not affect a start."""
    info = {"canary": CANARY, "vllm_modelinfos": {"some.module.Model.json": '{"a": 1}'}}
    bundle = publish(signer=sign.load_host_key(tmp_path / "stranger"), kv=KV, modelinfo=info)
    plan = prepare_plan(bundle, model)
    assert "the bundle has no trusted signature" in reasons(plan)["modelinfo"] and plan.canary is None
    assert not list(Path(plan.env["VLLM_CACHE_ROOT"]).rglob("*.json"))


def test_a_copied_cache_brings_no_trust(
    publish: Publish, model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = publish(kv=KV, modelinfo={})
    place = Path(prepare_plan(bundle, model).compile_dir or "")
    (place / "kernel.so").write_bytes(b"altered on the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    plan = prepare_plan(bundle, model)
    assert plan.compile_dir is None and "CS-UNTRUSTED" in reasons(plan)["compile"]
    sign.add_trusted_key(sign.trust_dir(paths.state_dir()), public_key(), name="other")
    again = Path(prepare_plan(bundle, model).compile_dir or "")
    assert again == place and (place / "kernel.so").read_bytes() == CODE["kernel.so"]


def public_key() -> bytes:
    """Return the public key of the user that published."""
    state = Cache.at().root.parents[1] / "state_home" / "coldstart"
    return bytes(sign.load_host_key(state).public_pem)
