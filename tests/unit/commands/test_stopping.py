"""The last lines of `up` name the commands that stop the server, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.commands._stopping import StopCosts, describe, find_costs, record_preparation
from support.engines import fake_engine, home, model, publish
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import preparation, server_process, template_pool
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

__all__ = ["fake_engine", "home", "model", "publish"]


@pytest.mark.parametrize(
    ("costs", "detached", "line"),
    [
        (StopCosts(), True, "Stop it: coldstart down tiny-llama"),
        (StopCosts(), False, "Stop it: Ctrl-C; with --detach the server runs in the background"),
        (
            StopCosts(True, 0.62, 22.8, 540 << 20),
            True,
            "Stop it: coldstart down tiny-llama --keep-template (the next up takes about 0.6 s),"
            " or coldstart down tiny-llama (frees 540.0 MiB; the next up prepares again, in about 23 s)",
        ),
        (
            StopCosts(True, 0.62, 36.6, was_first=True),
            True,
            "Stop it: coldstart down tiny-llama --keep-template (the next up takes about 0.6 s),"
            " or coldstart down tiny-llama (the next up prepares again, which took 37 s the first time)",
        ),
        (
            StopCosts(True),
            True,
            "Stop it: coldstart down tiny-llama --keep-template (the next up needs no preparation),"
            " or coldstart down tiny-llama (the next up takes longer)",
        ),
        (
            StopCosts(True, 0.62, 22.8, 540 << 20),
            False,
            "Stop it: Ctrl-C, which keeps the template (the next up takes about 0.6 s); then, without the template:"
            " coldstart down tiny-llama (frees 540.0 MiB; the next up prepares again, in about 23 s)",
        ),
    ],
)
def test_stop_line_names_the_commands_and_what_they_cost(costs: StopCosts, detached: bool, line: str) -> None:
    assert describe("tiny-llama", costs, detached=detached) == line


def test_costs_come_from_the_template_and_its_last_preparation(
    home: Path, model: ResolvedModel, fake_engine: Callable[[str], None]
) -> None:
    fake_engine("serves")
    lookup = Lookup(model, Arguments(), Cache.at(), key())
    plan = LaunchPlan(["serves"], key=lookup.key.digest)

    def prepare() -> preparation.Preparation:
        prepared = preparation.prepare_fastest(lookup, plan, lambda _: nullcontext(), 20)
        record_preparation(lookup, prepared)
        return prepared

    first = prepare()
    warm = preparation.find_template(lookup, first)
    assert warm is not None and first.is_new and first.seconds > 0
    server, _ = server_process.forked(plan, warm.socket)
    costs = find_costs(lookup, first, 0.5, server.pid)
    assert costs.kept_s is None and costs.built_s == pytest.approx(first.seconds, abs=0.01)
    assert costs.freed_bytes
    assert costs.was_first
    second = prepare()
    again = find_costs(lookup, second, 0.5, server.pid)
    assert not second.is_new and (again.kept_s, again.built_s) == (0.5, costs.built_s)
    template_pool.stop(warm, force=True)
    assert find_costs(lookup, second, 0.5, server.pid) == StopCosts()
    # The first preparation fills caches, so a later one shows the time of the next.
    record_preparation(lookup, replace(first, seconds=7.0))
    third = prepare()
    warm = preparation.find_template(lookup, third)
    assert warm is not None and third.is_new
    costs = find_costs(lookup, third, 0.5, server.pid)
    assert not costs.was_first and costs.built_s == pytest.approx(third.seconds, abs=0.01)
    template_pool.stop(warm, force=True)
