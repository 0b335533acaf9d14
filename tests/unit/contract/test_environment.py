"""Every variable is read through the table, and docs/environment.md equals the table."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import pytest

from coldstart.contract import environment
from coldstart.contract.environment import EVERY, Variable


@pytest.mark.parametrize("variable", EVERY)
def test_read_returns_the_default_when_unset(variable: Variable[object]) -> None:
    assert variable.about.endswith(".")
    assert variable.read({}) == variable.read({variable: ""}) == variable.default


@pytest.mark.parametrize("text", ["none", "0", "-1", "inf", "nan", "1e999"])
def test_a_number_out_of_bounds_is_named(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"invalid COLDSTART_PREFETCH_STREAMS: '{text}', expected a number of at least 1"
    ):
        environment.PREFETCH_STREAMS.read({"COLDSTART_PREFETCH_STREAMS": text})


def test_values_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.PREFETCH_IDLE_S, "1.5")
    monkeypatch.setenv(environment.DEBUG, "yes")
    assert environment.PREFETCH_IDLE_S.read() == 1.5 and environment.DEBUG.read() is False
    assert environment.DEBUG.read({"COLDSTART_DEBUG": "1"}) is True


def test_copied_and_serialized_variable_is_a_plain_string() -> None:
    variable = environment.PLAN
    assert variable == "COLDSTART_PLAN" and hash(variable) == hash("COLDSTART_PLAN")
    for other in (copy.deepcopy(variable), pickle.loads(pickle.dumps(variable))):
        assert type(other) is str and other == variable
    assert json.dumps({variable: 1}) == '{"COLDSTART_PLAN": 1}'
    shown = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['COLDSTART_PLAN'])"],
        env={variable: "x"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "x\n"
