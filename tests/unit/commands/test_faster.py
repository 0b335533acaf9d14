"""After a slow start one line names the command that prepares a faster mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldstart.commands import _serving
from coldstart.commands._serving import SLOW_S
from coldstart.commands._serving import advise_faster as advise
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

TEMPLATE = Fallback("template-engine", "none runs", "coldstart template start tiny --level engine")
SNAPSHOT = Fallback("snapshot", "the bundle has none", "coldstart materialize tiny --snapshot")
FREEZE = Fallback("runtime-snapshot", "no runtime is frozen", "coldstart template freeze")
FOREIGN = Fallback("snapshot", "no CUDA state", "vllm snapshot create MODEL")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Cache.at()


def look_up(*arguments: str) -> Lookup:
    return Lookup(ResolvedModel("tiny", None, "org/tiny", None, {}), Arguments(arguments), Cache.at(), key())


@pytest.mark.parametrize(
    ("unavailable", "line"),
    [
        ([TEMPLATE, SNAPSHOT], "(template-engine): coldstart template start tiny --level engine"),
        ([FOREIGN, SNAPSHOT], "(snapshot): coldstart materialize tiny --snapshot -- --seed 1"),
        ([FREEZE], "(runtime-snapshot): coldstart template freeze"),
    ],
)
def test_advise_names_the_fastest_mode_after_a_slow_start(unavailable: list[Fallback], line: str) -> None:
    assert advise(look_up("--seed", "1"), SLOW_S, unavailable) == f"For a faster next start {line}"


def test_advise_is_silent_after_a_fast_start_or_without_a_faster_mode() -> None:
    assert advise(look_up(), SLOW_S - 0.1, [TEMPLATE]) is None
    assert advise(look_up(), SLOW_S, []) is None
    assert advise(look_up(), SLOW_S, [FOREIGN]) is None


def test_advise_shows_no_secret() -> None:
    line = advise(look_up("--api-key", "very-secret"), SLOW_S, [SNAPSHOT])
    assert line is not None and "very-secret" not in line


@pytest.mark.parametrize(
    ("ready_s", "longest", "end"),
    [
        (14.91, ["import vllm", 6.52], "; import vllm took 6.5 s of it; -v shows all phases"),
        (0.9, ["import vllm", 0.5], ""),
        (14.91, None, ""),
    ],
)
def test_ready_line_names_the_longest_phase_of_a_slow_start(
    ready_s: float, longest: list[object] | None, end: str
) -> None:
    report = {"url": "http://x:1", "mode": "fresh", "ready_s": ready_s}
    line = f"http://x:1  fresh, ready in {ready_s:.2f} s{end}"
    assert _serving.describe(report | {"longest_phase": longest}) == line
    shown = _serving.describe(report | {"longest_phase": longest}, phases_follow=True)
    assert shown == line.removesuffix("; -v shows all phases")
