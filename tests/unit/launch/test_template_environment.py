"""Variables that keep a template or a snapshot from serving, and those that do not."""

from __future__ import annotations

import pytest

from coldstart.launch import template_environment

IRRELEVANT = {
    "VLLM_PORT_8000_TCP": "tcp://10.43.1.39:8000",
    "VLLM_SERVICE_HOST": "10.43.1.39",
    "HF_HUB_MIRROR_SERVICE_PORT": "80",
    "RAY_HEAD_PORT": "tcp://10.43.1.41:6379",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3",
    "VLLM_HOST_IP": "10.1.2.3",
    "VLLM_DP_MASTER_PORT": "29500",
    "MASTER_ADDR": "10.1.2.3",
    "NCCL_SOCKET_IFNAME": "eth0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LOG_LEVEL": "debug",
    "LOGLEVEL": "debug",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOG_STATS_INTERVAL": "5",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_LOGS": "+dynamo",
}


@pytest.mark.parametrize(("name", "value"), IRRELEVANT.items())
def test_difference_is_none_when_nothing_built_depends_on_the_variable(name: str, value: str) -> None:
    assert template_environment.find_difference({}, {name: value}, "template") is None
    assert template_environment.select_relevant({name: value}) == {}


def test_difference_names_a_variable_of_vllm() -> None:
    reason = template_environment.find_difference({}, {"VLLM_CPU_SIM_MULTI_NUMA": "1"}, "snapshot")
    assert reason is not None and reason.startswith("VLLM_CPU_SIM_MULTI_NUMA")
