"""load and replay over fake servers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.verify import Finding

from coldstart.errors import UsageError
from coldstart.validate.answers import PromptSettings
from coldstart.validate.checks import Level
from coldstart.validate.launch import Command, RunFiles
from coldstart.validate.start import Pair, Starts

SERVER = Path(__file__).parents[2] / "support" / "fake_server.py"


@dataclass
class Fake:
    mode: str
    behaviour: str
    tells_readiness: bool

    def prepare(self) -> None:
        return

    def command(self, files: RunFiles) -> Command:
        argv = [sys.executable, "-I", "-S", str(SERVER), str(files.port), str(files.ready)]
        return Command([*argv, self.behaviour, self.mode])

    def close(self) -> None:
        return


def codes(bundle: Bundle, level: Level, ours: str, plain: str = "serves") -> list[str]:
    return [finding.code for finding in found(bundle, level, ours, plain)]


def found(
    bundle: Bundle, level: Level, ours: str, plain: str = "serves", crowds: Sequence[int] = ()
) -> list[Finding]:
    def pair(bundle: Bundle, directory: Path) -> Pair:
        return Fake("fresh", ours, True), Fake("vllm-cold", plain, False)

    settings = PromptSettings(("a", "b"), max_tokens=4, ready_timeout_s=20, crowds=crowds)
    return Starts(pair, settings)(bundle, level)


@pytest.mark.parametrize(
    ("level", "ours", "plain", "expected"),
    [
        ("load", "serves", "dies", []),
        ("load", "dies", "serves", ["CS-LOAD"]),
        ("load", "fell-back", "serves", ["CS-FALLBACK"]),
        ("replay", "serves", "serves", []),
        ("replay", "other-tokens", "serves", ["CS-REPLAY", "CS-REPLAY"]),
        ("replay", "serves", "dies", ["CS-REFERENCE-START"]),
    ],
)
def test_findings(bundle: Bundle, level: Level, ours: str, plain: str, expected: list[str]) -> None:
    assert codes(bundle, level, ours, plain) == expected


def test_a_prompt_that_no_server_takes_is_no_fault_of_the_bundle(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="rejected a prompt: HTTP 400: too long") as refused:
        codes(bundle, "replay", "refuses")
    assert refused.value.hint is not None and "--max-tokens" in refused.value.hint


def test_a_crowd_is_compared_as_well(bundle: Bundle) -> None:
    (finding,) = found(bundle, "replay", "other-in-crowds", crowds=(3,))
    assert finding.code == "CS-REPLAY" and finding.subject == "tokens/prompt-1/3-at-once"
    assert "with 3 at once parts from vLLM's at token 0" in finding.message
