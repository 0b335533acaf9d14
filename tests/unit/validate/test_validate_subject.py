"""Resolve a name to a bundle, and a bundle to the model and arguments of its server."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from coldstart.artifacts import blobs, sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from safetensors.numpy import load_file, save_file
from support.fake_launcher import FakeLauncher
from tools import bundles, tiny_models

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError
from coldstart.models import keys, resolution
from coldstart.models.inspection import Lookup
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.validate import start, validation
from coldstart.validate.checks import Finding, check_bundle
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.validation import Source, ValidationRequest
from coldstart.weights import weights_plan as weights

ARGS = ("--max-model-len", "512")


@dataclass(frozen=True)
class Materialized:
    """Bundle of a directory called my-model, as created by materialize."""

    bundle: Bundle
    directory: Path
    source: Source

    @property
    def store(self) -> Store:
        return Store(self.bundle.layout.root)


@pytest.fixture
def materialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Materialized:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    cache = Cache.at(tmp_path / "cache")
    directory = shutil.copytree(tiny_models.place("tiny-llama", cache.models), tmp_path / "files")
    key = keys.compose(resolution.resolve(str(directory), cache=cache), Arguments(ARGS))
    return Materialized(publish(cache, tmp_path, key), directory, Source(cache=cache, offline=True))


def explain(
    bundle: Bundle, lookup: Lookup, word: str = "my-model", source: Source | None = None
) -> list[Finding]:
    return validation.explain_not_served(bundle, lookup, word, "load", source or Source(cache=lookup.cache))


def publish(cache: Cache, scratch: Path, key: keys.Key, name: str = "my-model", **kv: object) -> Bundle:
    store = Store(cache.bundles)
    with store.open_draft(key) as draft:
        draft.add_json("kv", bundles.KV | kv)
        provenance = replace(bundles.provenance(name), arguments=ARGS)
        return draft.publish(provenance, signer=sign.load_host_key(paths.state_dir()))


def test_find_bundle_resolves_references(materialized: Materialized) -> None:
    for word in ("my-model", "my-model:v1", materialized.bundle.ref, materialized.bundle.digest[7:19]):
        assert validation.find_bundle(word, materialized.source).digest == materialized.bundle.digest
    assert (
        validation.find_bundle("my-model:v1", replace(materialized.source, vllm_args=("--seed", "3")))
        is not None
    )


def test_a_model_is_looked_up_with_its_arguments(materialized: Materialized) -> None:
    asked = replace(materialized.source, vllm_args=ARGS)
    assert validation.find_bundle(str(materialized.directory), asked).digest == materialized.bundle.digest
    assert validation.find_bundle("tiny-llama", asked).digest == materialized.bundle.digest
    with pytest.raises(NoBundleError, match="--max-model-len: 512 in the bundle, 64 requested"):
        validation.find_bundle(
            "tiny-llama",
            replace(materialized.source, vllm_args=("--max-model-len", "64")),
        )
    with pytest.raises(NoBundleError):
        validation.find_bundle(str(materialized.directory), materialized.source)


def test_untrusted_bundle_is_not_started(
    materialized: Materialized, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    typed = replace(materialized.source, model=str(materialized.directory))
    again = f"coldstart validate my-model --level load --model {materialized.directory}"
    # The look-up without arguments takes those of the bundle, of which the hint shows none.
    for arguments, after in ((), ""), (("--max-model-len=5 12",), " -- '--max-model-len=5 12'"):
        source = replace(typed, vllm_args=arguments)
        lookup = validation.look_up_bundle(materialized.bundle, "my-model", typed)
        (finding,) = explain(materialized.bundle, lookup, source=source)
        assert "is not trusted" in finding.message and "coldstart trust add FILE" in finding.hint
        assert finding.hint.endswith(f", then `{again}{after}`")


def _overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))


def _save_shards(directory: Path) -> None:
    """Write the weights of a directory as two files with an index."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    names, shards = sorted(tensors), [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = {shards[0]: names[::2], shards[1]: names[1::2]}
    for shard, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    index = {name: shard for shard, held in parts.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole.unlink()


def _replace_a_shard(directory: Path) -> None:
    shard = directory / "model-00002-of-00002.safetensors"
    other = shutil.copyfile(shard, directory / "other")
    _overwrite(other)
    other.rename(shard)


def _quantize(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )


def _leave(directory: Path) -> None:
    """Change nothing."""


@pytest.mark.parametrize(
    ("before", "change", "expected"),
    [
        (_leave, _leave, []),
        (_leave, _save_shards, []),
        (_leave, lambda directory: _overwrite(directory / "model.safetensors"), ["CS-OTHER-WEIGHTS"]),
        (_save_shards, _replace_a_shard, ["CS-OTHER-WEIGHTS"]),
        (_leave, _quantize, ["CS-NOT-SERVED"]),
    ],
    ids=["copy", "other-files", "other-bytes", "one-shard", "quantized"],
)
def test_a_bundle_is_validated_with_its_own_weights(
    materialized: Materialized,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Path], None],
    change: Callable[[Path], None],
    expected: list[str],
) -> None:
    started: list[str] = []

    def pair(of: ModelUnderTest, directory: Path) -> tuple[FakeLauncher, FakeLauncher]:
        started.append(of.model)
        return FakeLauncher("fresh"), FakeLauncher("vllm-cold")

    monkeypatch.setattr(start, "create_launcher_pair", pair)
    cache = materialized.source.cache
    before(materialized.directory)
    with Store(cache.bundles).open_draft(materialized.bundle.key) as draft:
        draft.add_json("kv", bundles.KV)
        draft.add_json("weights", weights.plan(materialized.directory))
        provenance = replace(bundles.provenance("my-model"), arguments=ARGS)
        draft.publish(provenance, signer=sign.load_host_key(paths.state_dir()))
    other = Path(shutil.copytree(materialized.directory, materialized.directory.with_name("copy")))
    change(other)
    source = replace(materialized.source, model=str(other))
    (report,) = validation.run(ValidationRequest(["my-model"], level="load", source=source))
    assert [finding.code for finding in report.findings] == expected
    assert started == ([] if expected else [str(other)])
    if expected == ["CS-OTHER-WEIGHTS"]:
        (finding,) = report.findings
        assert f"coldstart materialize {other} --force -- --max-model-len 512" in finding.hint


def damage(bundle: Bundle, section: str) -> None:
    path = blobs.blob_path(bundle.layout.root, bundle.find_readable_section(section).digest)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_found_by_checksum_and_not_by_manifest(bundle: Bundle) -> None:
    damage(bundle, "compile")
    assert check_bundle(bundle, "manifest").findings == ()
    report = check_bundle(bundle, "checksum")
    assert [finding.subject for finding in report.findings] == ["compile"]
    assert report.fails("error")


def test_foreign_machine_is_reported_by_field(bundle: Bundle) -> None:
    foreign = {"hardware.name": "gpu", "hardware.sms": 80, "runtime.vllm": "0.32", "model.name": "other"}
    report = check_bundle(bundle, "manifest", foreign)
    assert [finding.subject for finding in report.findings] == ["hardware.name", "hardware.sms"]
    assert {finding.code for finding in report.findings} == {"CS-KEY-MISMATCH"}
    assert "requires 'cpu', but the machine has 'gpu'" in report.findings[0].message
