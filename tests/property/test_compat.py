"""What the scheduler cannot run on, and its settings."""

from types import SimpleNamespace

import pytest

from coldstart.scheduling.settings import KEY, SchedulerSettings
from coldstart.vllm import compat
from coldstart.vllm.scheduling import SCHEDULER_CLS, limits
from coldstart.vllm.scheduling.counters import Counters, Exporter


def config(**changes: object) -> SimpleNamespace:
    scheduler = SimpleNamespace(policy="fcfs", enable_chunked_prefill=True)
    for name, value in changes.items():
        setattr(scheduler, name, value)
    return SimpleNamespace(scheduler_config=scheduler)


def test_the_installed_vllm_runs_it() -> None:
    limits.require(config())


def test_another_version_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "check", lambda feature, load=None: f"no {feature} here.")
    with pytest.raises(
        limits.IncompatibleVllmError, match=r"no scheduler here\. Serve with --scheduler fcfs"
    ):
        limits.require(config())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "priority"}, "priority"),
        ({"enable_chunked_prefill": False}, "chunked"),
    ],
)
def test_what_it_cannot_drive_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(limits.IncompatibleVllmError, match=words):
        limits.require(config(**change))


def test_settings_survive_the_command_line() -> None:
    settings = SchedulerSettings(batch=4, alpha_s=1.5, profile={"prefill": [[1, 0.1]], "decode": [[1, 0.1]]})
    assert SchedulerSettings.read(settings.additional_config()) == settings
    assert settings.iteration_profile().shortest_s == 0.1
    assert SchedulerSettings.read({}) == SchedulerSettings()
    assert SCHEDULER_CLS.endswith("PolicyScheduler")


@pytest.mark.parametrize(
    "given", [{"alpha": 1}, {"strategy": "magic"}, {"policy": "srpt"}, {"batch": 0}, {"oldest_share": 2}, 3]
)
def test_bad_settings_are_refused(given: object) -> None:
    with pytest.raises(ValueError):
        SchedulerSettings.read({KEY: given})


def test_nothing_is_exported_without_a_directory_for_it() -> None:
    Exporter({}).publish(Counters(), [1, 2])
