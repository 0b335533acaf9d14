"""Levels load and replay with fake servers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from coldstart.artifacts.verify import Finding
from support.fake_launcher import FakeLauncher
from tools import bundles

from coldstart.errors import UsageError
from coldstart.validate.answers import PromptSettings
from coldstart.validate.checks import Level
from coldstart.validate.launch import explain_slow_path
from coldstart.validate.start import Pair, Starts


def codes(bundle: Bundle, level: Level, ours: str, plain: str = "serves") -> list[str]:
    return [finding.code for finding in validate(bundle, level, ours, plain)]


def validate(
    bundle: Bundle, level: Level, ours: str, plain: str = "serves", crowds: Sequence[int] = ()
) -> list[Finding]:
    def pair(bundle: Bundle, directory: Path) -> Pair:
        return FakeLauncher("fresh", ours), FakeLauncher("vllm-cold", plain)

    settings = PromptSettings(("a", "b"), max_tokens=4, ready_timeout_s=20, crowds=crowds)
    return Starts(pair, settings)(bundle, level)


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
    bundle: Bundle, level: Level, ours: str, plain: str, expected: list[str]
) -> None:
    assert codes(bundle, level, ours, plain) == expected


def test_hint_of_a_fallback_helps(store: Store, tmp_path: Path) -> None:
    """Where vLLM compiles nothing, another materialization comes to the same result."""

    def hints(behaviour: str, reason: str) -> list[str]:
        with store.begin(bundles.key()) as draft:
            draft.add_json("stages", {"not_made": {"compile": reason}})
            bundle = draft.publish(bundles.provenance())
        return [finding.hint for finding in validate(bundle, "load", behaviour)]

    (hint,) = hints("compiles-nothing", "vLLM compiles no part")
    assert "with which vLLM compiles" in hint and "--force" not in hint
    (hint,) = hints("fell-back", "vLLM compiles no part")
    assert hint.endswith("--force")
    (hint,) = hints("compiles-nothing", "the proof start failed with it: no memory")
    assert hint.endswith("--force")


def test_prompt_refused_by_both_servers_is_an_error_of_the_user(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="rejected a prompt: HTTP 400: too long") as refused:
        codes(bundle, "replay", "refuses")
    assert refused.value.hint is not None and "--max-tokens" in refused.value.hint


def test_a_crowd_is_compared_as_well(bundle: Bundle) -> None:
    (finding,) = validate(bundle, "replay", "other-in-crowds", crowds=(3,))
    assert finding.code == "CS-REPLAY" and finding.subject == "tokens/prompt-1/3-at-once"
    assert "with 3 at once differs from vLLM's at token 0" in finding.message


@pytest.mark.parametrize(
    ("readiness", "reasons"),
    [
        ({"fast_path": {"compile": True}, "fallbacks": []}, []),
        ({}, ["the ready file does not report the used sections"]),
        ({"fast_path": {"compile": True}}, ["the ready file does not report the used sections"]),
        ({"fast_path": {}, "fallbacks": []}, ["no section of the bundle was used"]),
        ({"fast_path": {}, "fallbacks": [], "canary": True}, []),
        ({"fast_path": {"compile": False}, "fallbacks": []}, ["compile was not used"]),
        (
            {"fast_path": {"compile": False}, "fallbacks": [{"section": "compile", "reason": "another ISA"}]},
            ["compile: another ISA"],
        ),
    ],
)
def test_the_slow_path_is_explained_by_the_ready_file(
    readiness: dict[str, object], reasons: list[str]
) -> None:
    assert explain_slow_path(readiness) == reasons
