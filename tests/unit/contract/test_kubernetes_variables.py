"""Variables that Kubernetes injects for services: recognised by the end of the name and the form of the value."""

from __future__ import annotations

import os

import pytest

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan

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
