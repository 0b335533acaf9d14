"""Levels load and replay with fake servers."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from support.fake_launcher import FakeLauncher

from coldstart.errors import UsageError
from coldstart.validate import renderers, responses, start
from coldstart.validate.checks import Finding, Level, ValidationReport
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.responses import (
    Divergence,
    PromptSettings,
    Response,
    compare_responses,
    find_divergence,
)

Validate = Callable[..., list[Finding]]


@pytest.fixture
def validate(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Validate:
    """Return a function that checks the bundle with fake servers of these behaviours."""

    def check(
        level: Level, actual: str, plain: str = "serves", concurrency_levels: Sequence[int] = ()
    ) -> list[Finding]:
        launchers = FakeLauncher("fresh", actual), FakeLauncher("vllm-cold", plain)
        monkeypatch.setattr(start, "create_launcher_pair", lambda *_: launchers)
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


def test_concurrent_answer_may_equal_any_answer_of_vllm() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9), answer(1, 2, 3)]}
    assert compare_responses(("one",), {1: plain[1], 2: [answer(1, 9, 9), answer(1, 9, 9)]}, plain, "m") == []


def test_no_finding_after_vllm_differs_from_itself() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9)] * 2}
    (found,) = compare_responses(("one",), {1: plain[1], 2: [answer(1, 2, 4)] * 2}, plain, "m")
    assert (found.code, found.severity) == ("CS-REPLAY-UNSTABLE", "warning")
    assert "vLLM's own responses to concurrent requests differ at token 1" in found.message


def test_finding_before_vllm_differs_from_itself() -> None:
    plain = {1: [answer(1, 2, 3)], 2: [answer(1, 9, 9)] * 2}
    (found,) = compare_responses(("one",), {1: plain[1], 2: [answer(5, 2, 3)] * 2}, plain, "m")
    assert (found.code, found.subject) == ("CS-REPLAY", "tokens/prompt-1/2-at-once")


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
