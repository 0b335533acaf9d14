"""After a slow start one line names the command that prepares a faster mode."""

from __future__ import annotations

import pytest
from coldstart.commands._faster import SLOW_S, advise
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

TEMPLATE = Fallback("template-engine", "none runs", "coldstart template start tiny --level engine")
SNAPSHOT = Fallback("snapshot", "the bundle has none", "coldstart materialize MODEL --snapshot")
FREEZE = Fallback("runtime-snapshot", "no runtime is frozen", "coldstart template freeze")
FOREIGN = Fallback("snapshot", "no CUDA state", "vllm snapshot create MODEL")


def look_up(*arguments: str) -> Lookup:
    return Lookup(ResolvedModel("tiny", None, "org/tiny", None, {}), Arguments(arguments), Cache.at(), key())


@pytest.mark.parametrize(
    ("unavailable", "line"),
    [
        ([TEMPLATE, SNAPSHOT], "(template-engine): coldstart template start tiny --level engine -- --seed 1"),
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
    line = advise(look_up("--api-key", "very-secret"), SLOW_S, [TEMPLATE])
    assert line is not None and "very-secret" not in line
