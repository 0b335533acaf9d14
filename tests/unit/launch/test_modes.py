"""The list of start modes, as host, benchmark and templates use it."""

from __future__ import annotations

import pytest

from coldstart.bench import run_order
from coldstart.contract.template_levels import LEVELS
from coldstart.errors import UsageError
from coldstart.host.launches import Launch
from coldstart.launch import modes, preparation


def test_host_and_benchmark_use_the_modes_that_start_any_number_of_servers() -> None:
    assert set(run_order.MODES) == {*run_order.BASELINES, *modes.repeatable_names()}
    assert [Launch("m", "m", mode=name).mode for name in modes.repeatable_names()]
    with pytest.raises(UsageError, match="unknown mode 'standby'"):
        Launch("m", "m", mode="standby")


def test_every_template_level_has_one_mode() -> None:
    assert {level: preparation.find_mode(level).name for level in LEVELS} == {
        "runtime": "template-runtime",
        "engine": "template-engine",
        "asleep-1": "standby",
        "asleep-2": "standby",
    }
    with pytest.raises(UsageError, match="Unknown template level 'warm'"):
        preparation.find_mode("warm")
