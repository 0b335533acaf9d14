"""Levels load and replay with fake servers."""

from collections.abc import Callable, Sequence

import pytest
from coldstart.artifacts.bundle import Bundle
from support.fake_launcher import FakeLauncher

from coldstart.errors import UsageError
from coldstart.validate import start
from coldstart.validate.answers import PromptSettings
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launchers import Subject

Validate = Callable[..., list[Finding]]


@pytest.fixture
def validate(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Validate:
    """Return validate(level, ours, plain, crowds), which checks the bundle with fake servers of these behaviours."""

    def check(level: Level, ours: str, plain: str = "serves", crowds: Sequence[int] = ()) -> list[Finding]:
        launchers = FakeLauncher("fresh", ours), FakeLauncher("vllm-cold", plain)
        monkeypatch.setattr(start, "pair_launchers", lambda *_: launchers)
        settings = PromptSettings(("a", "b"), max_tokens=4, ready_timeout_s=20, crowds=crowds)
        return start.check_start(bundle, level, Subject("m", "/m"), settings)

    return check


@pytest.mark.parametrize(
    ("level", "ours", "plain", "expected"),
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
    validate: Validate, level: Level, ours: str, plain: str, expected: list[str]
) -> None:
    assert [finding.code for finding in validate(level, ours, plain)] == expected


def test_prompt_refused_by_both_servers_is_an_error_of_the_user(validate: Validate) -> None:
    with pytest.raises(UsageError, match="rejected a prompt: HTTP 400: too long") as refused:
        validate("replay", "refuses")
    assert refused.value.hint is not None and "--max-tokens" in refused.value.hint


def test_a_crowd_is_compared_as_well(validate: Validate) -> None:
    (finding,) = validate("replay", "other-in-crowds", crowds=(3,))
    assert finding.code == "CS-REPLAY" and finding.subject == "tokens/prompt-1/3-at-once"
    assert "with 3 at once differs from vLLM's at token 0" in finding.message
