"""The chosen scheduler becomes vLLM flags outside the key, and vLLM's scheduler runs if ours is incompatible."""

import json
import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import REASON, Publish

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import UsageError
from coldstart.launch import scheduler
from coldstart.scheduling.settings import KEY, SchedulerSettings
from coldstart.vllm.scheduling import SCHEDULER_CLS, settle

PROFILE = {"prefill": [[16, 0.01], [64, 0.02]], "decode": [[1, 0.004], [8, 0.006]]}
PLAN = LaunchPlan(["--model", "m"])


def flags(plan: LaunchPlan) -> dict[str, str]:
    given = plan.vllm_args[len(PLAN.vllm_args) :]
    return dict(zip(given[::2], given[1::2], strict=True))


def mlfq(**settings: object) -> SchedulerSettings:
    return SchedulerSettings("skip-join-mlfq", **settings)  # type: ignore[arg-type]


def test_deadlines_are_priorities_of_vllms_own_scheduler(publish: Publish) -> None:
    choice = SchedulerSettings("deadline", batch=4, factor=8.0, slo_s=2.0)
    made = scheduler.apply_scheduler(PLAN, choice, publish(iterations=PROFILE), on_cpu=True)
    given = flags(made)
    assert (given["--scheduling-policy"], given["--max-num-active-seqs"]) == ("priority", "4")
    assert given.keys() == {"--scheduling-policy", "--max-num-active-seqs", "--additional-config"}
    told = SchedulerSettings.from_additional_config(json.loads(given["--additional-config"]))
    assert replace(told, profile=None) == choice and told.profile is not None and not made.fallbacks
    with pytest.raises(UsageError, match="--scheduling-policy cannot be combined with --scheduler deadline"):
        scheduler.check_scheduler(choice, Arguments(["--scheduling-policy", "fcfs"]))
    with pytest.raises(UsageError, match="cannot use --alpha with deadline"):
        scheduler.check_scheduler(replace(choice, alpha_s=1.0), PLAN.vllm_args)
    with pytest.raises(
        UsageError, match=r"cannot use --deadline-slo with skip-join-mlfq.*--scheduler deadline"
    ):
        scheduler.check_scheduler(mlfq(slo_s=1.0), PLAN.vllm_args)


def test_deadline_classes_are_checked_and_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    choice = SchedulerSettings("deadline", classes="classes.toml")
    with pytest.raises(UsageError, match="cannot read the request classes in"):
        scheduler.check_scheduler(choice, PLAN.vllm_args)
    Path("classes.toml").write_text('[batch]\npriority = 1\nheader = "X-Class: batch"')
    scheduler.check_scheduler(choice, PLAN.vllm_args)
    given = flags(scheduler.apply_scheduler(PLAN, choice, None, on_cpu=True))
    assert given["--middleware"] == "coldstart.vllm.scheduling.headers.KeepHeaders"
    told = SchedulerSettings.from_additional_config(json.loads(given["--additional-config"]))
    assert told.classes == str(tmp_path / "classes.toml")
    with pytest.raises(UsageError, match="cannot use --deadline-classes with fcfs"):
        scheduler.check_scheduler(SchedulerSettings("fcfs", classes="classes.toml"), PLAN.vllm_args)


def test_settings_and_the_bundles_profile_reach_vllm(publish: Publish) -> None:
    bundle = publish(iterations=PROFILE, kv={"bytes": 4096})
    choice = mlfq(batch=4, first_quantum_s=0.5, eta=2, alpha_s=3.0, oldest_share=0.5, reserve_quantile=0.8)
    made = scheduler.apply_scheduler(PLAN, choice, bundle, on_cpu=True)
    assert flags(made)["--scheduler-cls"] == SCHEDULER_CLS
    told = json.loads(flags(made)["--additional-config"])[KEY]
    wanted = {"batch": 4, "first_quantum_s": 0.5, "eta": 2, "alpha_s": 3.0, "reserve_quantile": 0.8}
    assert wanted.items() <= told.items() and told["profile"]["decode"] == PROFILE["decode"]
    assert made.fallbacks == []
    connector = json.loads(flags(made)["--kv-transfer-config"])["kv_connector_extra_config"]
    assert connector["cpu_bytes_to_use"] == 4096 and connector["offload_prompt_only"] is False


def ours() -> Namespace:
    settings = {KEY: {"policy": "skip-join-mlfq", "strategy": "proactive"}, "a": 1}
    return Namespace(scheduler_cls=SCHEDULER_CLS, additional_config=settings, kv_transfer_config=1)


def test_incompatible_vllm_runs_its_scheduler_with_a_reason(lacking: set[str]) -> None:
    lacking.add("scheduler")
    plan, args = LaunchPlan([]), ours()
    assert settle.drop_unsupported_scheduler(args, None, plan)
    assert (args.scheduler_cls, args.additional_config, args.kv_transfer_config) == (None, {}, None)
    assert plan.fallbacks == [Fallback("scheduler", f"{REASON}; vLLM's own scheduler runs instead")]


def test_vllm_scheduler_runs_when_ours_is_missing(lacking: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coldstart.vllm.scheduling.scheduler", None)
    plan, args = LaunchPlan([]), ours()
    assert settle.drop_unsupported_scheduler(args, None, plan) and args.scheduler_cls is None
    assert "cannot load the scheduler: ModuleNotFoundError" in plan.fallbacks[0].reason


@pytest.mark.parametrize("given", [None, "somebody.elses.Scheduler"])
def test_other_schedulers_are_not_changed(given: str | None) -> None:
    args = Namespace(scheduler_cls=given, additional_config={"a": 1}, kv_transfer_config=1)
    assert not settle.drop_unsupported_scheduler(args, None, LaunchPlan([]))
    assert args.additional_config == {"a": 1}


def test_counters_have_a_directory_while_our_scheduler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pytest.importorskip("prometheus_client").values
    monkeypatch.delenv(settle.METRICS_ENV, raising=False)
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    with settle.publish_counters(LaunchPlan(["--model", "m"])):
        assert settle.METRICS_ENV not in os.environ
    with settle.publish_counters(LaunchPlan(["--scheduler-cls", SCHEDULER_CLS])):
        place = Path(os.environ[settle.METRICS_ENV])
        assert place.is_dir()
    assert not place.exists() and settle.METRICS_ENV not in os.environ
