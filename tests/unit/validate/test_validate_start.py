"""load and replay over fake servers."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle

from coldstart.measure.bench.launch import Command, RunFiles
from coldstart.measure.bench.measure import RunSettings
from coldstart.validate import start
from coldstart.validate.checks import Level
from coldstart.validate.start import Pair, Starts

SERVER = Path(__file__).parents[1] / "measure" / "bench" / "fake_server.py"


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
    def pair(bundle: Bundle, directory: Path) -> Pair:
        return Fake("fresh", ours, True), Fake("vllm-cold", plain, False)

    starts = Starts(pair, RunSettings(prompts=("a", "b"), max_tokens=4, ready_timeout_s=20, steady=False))
    return [finding.code for finding in starts(bundle, level)]


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


@pytest.mark.parametrize(
    ("bundled", "plain", "token"), [((1, 2, 3), (1, 5, 3), 1), ((4,), (1,), 0), ((1, 2), (1, 2, 3), 2)]
)
def test_a_difference_is_named_by_its_first_token(
    bundle: Bundle, bundled: tuple[int, ...], plain: tuple[int, ...], token: int
) -> None:
    finding = start._differs("a", (bundled, "x"), (plain, "y"), bundle)
    assert f"from token {token} on" in finding.message
