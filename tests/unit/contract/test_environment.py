"""Every variable is read through the table, and docs/environment.md equals the table."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import EVERY, Variable
from coldstart.contract.plan import LaunchPlan


@pytest.mark.parametrize("variable", EVERY)
def test_read_returns_the_default_when_unset(variable: Variable[object]) -> None:
    assert variable.about.endswith(".")
    assert variable.read({}) == variable.read({variable: ""}) == variable.default


@pytest.mark.parametrize("text", ["none", "0", "-1", "inf", "nan", "1e999"])
def test_a_number_out_of_bounds_is_named(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"'{text}' of COLDSTART_PREFETCH_STREAMS: expected a number of at least 1"
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


INJECTED = {
    "VLLM_SERVICE_HOST": "10.43.1.39",
    "VLLM_SERVICE_PORT": "8000",
    "VLLM_SERVICE_PORT_HTTP_METRICS": "9000",
    "VLLM_PORT": "tcp://10.43.1.39:8000",
    "VLLM_PORT_8000_TCP": "tcp://10.43.1.39:8000",
    "VLLM_PORT_53_UDP": "udp://[fd00::1]:53",
    "VLLM_PORT_8000_TCP_PROTO": "tcp",
    "VLLM_PORT_8000_TCP_PORT": "8000",
    "VLLM_PORT_8000_TCP_ADDR": "fd00::1",
    "TORCH_HUB_SERVICE_HOST": "10.43.1.40",
}


@pytest.mark.parametrize(("name", "value"), INJECTED.items())
def test_is_injected_when_kubernetes_sets_the_variable(name: str, value: str) -> None:
    assert environment.is_service_variable(name, value)


def test_install_removes_the_address_that_vllm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_PORT": "tcp://10.43.1.39:8000", "VLLM_HOST_IP": "10.1.2.3"})
    LaunchPlan(Arguments([])).install()
    assert "VLLM_PORT" not in os.environ and os.environ["VLLM_HOST_IP"] == "10.1.2.3"
