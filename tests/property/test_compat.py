"""Incompatible configurations of the scheduler, and its settings."""

from types import SimpleNamespace

import pytest

from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm import compat
from coldstart.vllm.scheduling import SCHEDULER_CLS, scheduler
from coldstart.vllm.scheduling.counters import Counters, Exporter


def config(stages: int = 1, connector: str | None = None, **changes: object) -> SimpleNamespace:
    fields = {"policy": "fcfs", "enable_chunked_prefill": True} | changes
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**fields),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_require_accepts_a_common_configuration(stages: int) -> None:
    scheduler.require_support(config(stages))


def test_require_names_the_missing_integration_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "check", lambda feature, load=None: f"no {feature} here.")
    with pytest.raises(
        scheduler.IncompatibleVllmError, match=r"no scheduler here; serve with --scheduler fcfs"
    ):
        scheduler.require_support(config())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "priority"}, "scheduling-policy priority"),
        ({"enable_chunked_prefill": False}, "chunked prefill"),
        ({"connector": "OffloadingConnector"}, "the KV connector OffloadingConnector"),
    ],
)
def test_require_refuses_unsupported_configuration(change: dict[str, object], words: str) -> None:
    with pytest.raises(scheduler.IncompatibleVllmError, match=words):
        scheduler.require_support(config(**change))  # type: ignore[arg-type]


def test_settings_survive_the_command_line() -> None:
    settings = SchedulerSettings(batch=4, alpha_s=1.5, profile={"prefill": [[1, 0.1]], "decode": [[1, 0.1]]})
    assert SchedulerSettings.read(settings.additional_config()) == settings
    assert settings.iteration_profile().shortest_s == 0.1
    assert SchedulerSettings.read({}) == SchedulerSettings()
    assert SCHEDULER_CLS.endswith("PolicyScheduler")


def test_exporter_publishes_nothing_without_a_directory() -> None:
    Exporter({}).publish(Counters(), [1, 2])
