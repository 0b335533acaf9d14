"""Resolve a name to a bundle, and a bundle to the model and arguments of its server."""

import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from safetensors.numpy import load_file, save_file
from support.fake_launcher import FakeLauncher
from tools import bundles, tiny_models

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError, UsageError
from coldstart.models import keys, resolution
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.validate import renderers, responses, start, validation
from coldstart.validate.checks import Finding, Level, ValidationReport, check_bundle
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.responses import (
    Divergence,
    PromptSettings,
    Response,
    compare_responses,
    find_divergence,
)
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
    key = keys.compose_key(resolution.resolve(str(directory), cache=cache), Arguments(ARGS))
    return Materialized(publish(cache, key), directory, Source(cache=cache, offline=True))


def publish(cache: Cache, key: keys.Key, **sections: object) -> Bundle:
    with Store(cache.bundles).open_draft(key) as draft:
        for name, value in {"kv": bundles.KV, **sections}.items():
            draft.add_json(name, value)
        provenance = replace(bundles.provenance("my-model"), arguments=ARGS)
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
            "tiny-llama", replace(materialized.source, vllm_args=("--max-model-len", "64"))
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
    bundle, word = materialized.bundle, "my-model"
    lookup = validation.look_up_bundle(bundle, word, typed)
    for arguments, after in ((), ""), (("--max-model-len=5 12",), " -- '--max-model-len=5 12'"):
        source = replace(typed, vllm_args=arguments)
        (finding,) = validation.explain_not_served(bundle, lookup, word, "load", source)
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

    def pair(of: ModelUnderTest, *_: object) -> tuple[FakeLauncher, FakeLauncher]:
        started.append(of.model)
        return FakeLauncher("fresh"), FakeLauncher("vllm-cold")

    monkeypatch.setattr(start, "create_launchers", pair)
    cache = materialized.source.cache
    before(materialized.directory)
    publish(cache, materialized.bundle.key, weights=weights.build_plan(materialized.directory))
    other = Path(shutil.copytree(materialized.directory, materialized.directory.with_name("copy")))
    change(other)
    source = replace(materialized.source, model=str(other))
    (report,) = validation.validate_all(ValidationRequest(["my-model"], level="load", source=source))
    assert [finding.code for finding in report.findings] == expected
    assert started == ([] if expected else [str(other)])
    if expected == ["CS-OTHER-WEIGHTS"]:
        (finding,) = report.findings
        assert f"coldstart materialize {other} --force -- --max-model-len 512" in finding.hint


def test_damage_is_found_by_checksum_and_not_by_manifest(bundle: Bundle) -> None:
    bundles.damage(bundle, "compile")
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


Validate = Callable[..., list[Finding]]


@pytest.fixture
def validate(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Validate:
    """Return a function that checks the bundle with fake servers of these behaviours."""

    def check(
        level: Level, actual: str, plain: str = "serves", concurrency_levels: Sequence[int] = ()
    ) -> list[Finding]:
        launchers = FakeLauncher("fresh", actual), FakeLauncher("vllm-cold", plain)
        monkeypatch.setenv("VLLM_API_KEY", "planted")  # the servers have it, too
        monkeypatch.setattr(start, "create_launchers", lambda *_: launchers)
        settings = PromptSettings(
            ("a", "b"), max_tokens=4, ready_timeout_s=20, concurrency_levels=concurrency_levels
        )
        return start.check_start(bundle, level, ModelUnderTest("m", "/m"), settings)

    return check


@pytest.mark.parametrize(
    ("level", "actual", "plain", "expected"),
    [
        ("load", "serves", "dies", []),
        ("load", "dies", "serves", ["CS-LOAD"]),
        ("load", "fell-back", "serves", ["CS-FALLBACK"]),
        ("load", "other-canary", "serves", ["CS-CANARY"]),
        ("replay", "serves", "serves", []),
        ("replay", "other-tokens", "serves", ["CS-REPLAY", "CS-REPLAY"]),
        ("replay", "serves", "dies", ["CS-REFERENCE-START"]),
    ],
)
def test_start_reports_findings(
    validate: Validate, level: Level, actual: str, plain: str, expected: list[str]
) -> None:
    assert [finding.code for finding in validate(level, actual, plain)] == expected


def test_prompt_refused_by_both_servers_is_an_error_of_the_user(validate: Validate) -> None:
    with pytest.raises(UsageError, match="rejected a prompt: HTTP status 400: too long") as refused:
        validate("replay", "refuses")
    assert refused.value.hint is not None and "--max-tokens" in refused.value.hint


def test_a_crowd_is_compared_as_well(validate: Validate) -> None:
    (finding,) = validate("replay", "other-in-crowds", concurrency_levels=(3,))
    assert finding.code == "CS-REPLAY" and finding.subject == "tokens/prompt-1/3-at-once"
    assert "with 3 concurrent requests differs from vLLM's at token 0" in finding.message


def answer(*tokens: int) -> Response:
    return tokens, " ".join(map(str, tokens))


@pytest.mark.parametrize(
    ("actual", "expected", "divergence"),
    [
        (answer(1, 2, 3), answer(1, 5, 3), Divergence(1, "2", "5")),
        (answer(4), answer(1), Divergence(0, "4", "1")),
        (answer(1, 2), answer(1, 2, 3), Divergence(2, "its end", "3")),
        (((), "ab"), ((), "ac"), Divergence(1, "'b'", "'c'")),
        (((1,), "ab"), ((), "ab"), None),
        (answer(1, 2), answer(1, 2), None),
    ],
)
def test_difference_has_position_and_both_tokens(
    actual: Response, expected: Response, divergence: Divergence | None
) -> None:
    assert find_divergence(actual, expected) == divergence


@pytest.mark.parametrize(
    ("plain", "ours", "expected"),
    [
        ([answer(1, 9, 9), answer(1, 2, 3)], answer(1, 9, 9), []),
        ([answer(1, 9, 9)] * 2, answer(1, 2, 4), [("CS-REPLAY-UNSTABLE", "warning")]),
        ([answer(1, 9, 9)] * 2, answer(5, 2, 3), [("CS-REPLAY", "error")]),
    ],
)
def test_concurrent_answer_counts_only_before_vllms_own_answers_differ(
    plain: list[Response], ours: Response, expected: list[tuple[str, str]]
) -> None:
    alone = [answer(1, 2, 3)]
    found = [*compare_responses(("one",), {1: alone, 2: [ours] * 2}, {1: alone, 2: plain}, "m")]
    assert [(one.code, one.severity) for one in found] == expected
    for one in found:
        assert one.subject == "tokens/prompt-1/2-at-once"
        own = "vLLM's own responses to concurrent requests differ at token 1"
        assert (own in one.message) == (one.severity == "warning")


def test_junit_parses_and_counts(reports: list[ValidationReport]) -> None:
    root = ElementTree.fromstring(renderers.render_junit(reports, "error").encode())
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert root.tag == "testsuites"
    assert suite.attrib["tests"] == root.attrib["tests"] == str(len(cases)) == "4"
    assert suite.attrib["failures"] == "1" == str(len(suite.findall("testcase/failure")))
    assert all(case.attrib["name"] and case.attrib["classname"] for case in cases)
    (failure,) = suite.findall("testcase/failure")
    assert failure.attrib["type"] == "CS-DIGEST"
    assert failure.text is not None and "<broken> & gone" in failure.text


def test_github_escapes_data_and_properties(reports: list[ValidationReport]) -> None:
    lines = renderers.render_github(reports, "error").split("\n")
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice"]
    grammar = re.compile(r"::(error|warning|notice) title=([^:,\r\n]+)::([^\r\n]+)")
    matched = [grammar.fullmatch(line) for line in lines]
    assert all(matched)
    first = matched[0]
    assert first is not None
    data = first[3].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert '50% of "it":\r\n<broken>' in data


def test_text_and_json_agree(reports: list[ValidationReport]) -> None:
    found = renderers.build_document(reports, "error")
    text = renderers.render_text(reports, "error")
    assert found["ok"] is False
    assert "org/bad@sha256:ab: invalid at level checksum" in text
    assert "org/good@sha256:cd: valid at level checksum" in text
    assert "hint: coldstart doctor" in text
    assert json.loads(json.dumps(found))["bundles"][0]["findings"][1]["code"] == "CS-FALLBACK"


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"\n \n", "contains no prompt"), (b"\xff\xfe", "cannot read prompts"), (None, "cannot read")],
)
def test_file_without_prompts_is_refused(tmp_path: Path, data: bytes | None, said: str) -> None:
    if data is not None:
        (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(UsageError, match=said) as refused:
        responses.read_prompts(tmp_path / "p.txt")
    assert refused.value.hint is not None and "one prompt per line" in refused.value.hint
