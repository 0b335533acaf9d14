"""What our scheduler cannot be run with is named, one reason for each."""

from types import SimpleNamespace

import pytest

from coldstart.scheduling import SchedulerSettings
from coldstart.vllm.scheduling.limits import unsupported


def config(*, stages: int = 1, order: str = "fcfs", chunked: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config=SchedulerSettings().additional_config(),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(policy=order, enable_chunked_prefill=chunked),
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_a_common_configuration_is_driven(stages: int) -> None:
    assert unsupported(config(stages=stages)) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (config(order="priority"), "scheduling-policy priority"),
        (config(chunked=False), "chunked prefill"),
    ],
)
def test_what_it_cannot_drive_is_named(given: SimpleNamespace, says: str) -> None:
    reason = unsupported(given)
    assert reason is not None and says in reason
