"""The choice of a scheduler becomes vLLM's flags outside the key, and vLLM's own runs where ours cannot."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from coldstart.artifacts.bundle import Bundle

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import Usage
from coldstart.serve import scheduler
from coldstart.serve.scheduler import Choice
from coldstart.vllm.scheduling import SCHEDULER_CLS
from coldstart.vllm.scheduling.config import KEY

Publish = Callable[..., Bundle]
PROFILE = {"prefill": [[16, 0.01], [64, 0.02]], "decode": [[1, 0.004], [8, 0.006]]}
PLAN = LaunchPlan(["--model", "m"])


def flags(plan: LaunchPlan) -> dict[str, str]:
    given = plan.vllm_args[len(PLAN.vllm_args) :]
    return dict(zip(given[::2], given[1::2], strict=True))


def mlfq(**settings: object) -> Choice:
    return Choice("skip-join-mlfq", **settings)  # type: ignore[arg-type]


def test_fcfs_changes_nothing_but_the_batch() -> None:
    assert scheduler.apply(PLAN, Choice(), None, [], on_cpu=True) == PLAN
    capped = scheduler.apply(PLAN, Choice(batch=4), None, [], on_cpu=True)
    assert flags(capped) == {"--max-num-active-seqs": "4"}


def test_fcfs_refuses_settings_that_it_would_ignore() -> None:
    with pytest.raises(Usage, match="fcfs takes --batch alone"):
        scheduler.apply(PLAN, Choice(alpha_s=1.0), None, [], on_cpu=True)


def test_settings_and_the_bundles_profile_reach_vllm(publish: Publish) -> None:
    bundle = publish(iterations=PROFILE, kv={"bytes": 4096})
    choice = mlfq(batch=4, quantum_s=0.5, eta=2, alpha_s=3.0, oldest_share=0.5, reserve=0.8)
    made = scheduler.apply(PLAN, choice, bundle, [], on_cpu=True)
    assert flags(made)["--scheduler-cls"] == SCHEDULER_CLS
    told = json.loads(flags(made)["--additional-config"])[KEY]
    wanted = {"batch": 4, "first_quantum_s": 0.5, "eta": 2, "alpha_s": 3.0, "reserve_quantile": 0.8}
    assert wanted.items() <= told.items() and told["profile"]["decode"] == PROFILE["decode"]
    assert made.fallbacks == []
    connector = json.loads(flags(made)["--kv-transfer-config"])["kv_connector_extra_config"]
    assert connector["cpu_bytes_to_use"] == 4096 and connector["offload_prompt_only"] is False


def test_no_core_is_given_up_for_the_connector(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"):
        monkeypatch.delenv(name, raising=False)
    bundle = publish(iterations=PROFILE)
    tensor_parallel = ["--tensor-parallel-size", "2"]
    assert scheduler.apply(PLAN, mlfq(), bundle, tensor_parallel, on_cpu=True).env == {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "2"
    }
    assert scheduler.apply(PLAN, mlfq(strategy="recompute"), bundle, [], on_cpu=True).env == {}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert scheduler.apply(PLAN, mlfq(), bundle, [], on_cpu=True).env == {}


def test_without_iteration_times_it_says_so(publish: Publish) -> None:
    for bundle in (None, publish(), publish(iterations={"prefill": []})):
        made = scheduler.apply(PLAN, mlfq(), bundle, [], on_cpu=True)
        (fallback,) = made.fallbacks
        assert fallback["section"] == "iterations" and "typical shape" in fallback["reason"]
        assert "profile" not in json.loads(flags(made)["--additional-config"])[KEY]


@pytest.mark.parametrize("settings", [{"oldest_share": 1.5}, {"strategy": "wishful"}, {"batch": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(Usage, match="scheduler's settings"):
        scheduler.apply(PLAN, mlfq(**settings), None, [], on_cpu=True)


@pytest.mark.parametrize("flag", ["--scheduler-cls", "--additional-config", "--kv-transfer-config"])
def test_two_choices_are_refused(flag: str) -> None:
    with pytest.raises(Usage, match=flag):
        scheduler.apply(PLAN, mlfq(), None, [flag, "x"], on_cpu=True)


class Stock:
    """A vLLM that lacks what the scheduler stands on."""


def test_another_vllm_keeps_its_own_scheduler_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", "vllm.v1.core.sched.async_scheduler")
    modules = {name: ModuleType(name) for name in (*names, "vllm.v1.request")}
    modules["vllm.v1.core.sched.async_scheduler"].AsyncScheduler = type("AsyncScheduler", (Stock,), {})  # type: ignore[attr-defined]
    modules["vllm.v1.request"].Request = Stock  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    plan = LaunchPlan([])
    args = Namespace(scheduler_cls=SCHEDULER_CLS, additional_config={"a": 1}, kv_transfer_config=object())
    assert scheduler.settle(args, None, plan)
    assert (args.scheduler_cls, args.additional_config, args.kv_transfer_config) == (None, {}, None)
    (fallback,) = plan.fallbacks
    assert fallback["section"] == "scheduler" and "_request_remaining_blocks" in fallback["reason"]
    assert "--scheduler fcfs" not in fallback["reason"]


@pytest.mark.parametrize("given", [None, "somebody.elses.Scheduler"])
def test_other_schedulers_are_left_alone(given: str | None) -> None:
    args = Namespace(scheduler_cls=given, additional_config={"a": 1}, kv_transfer_config=1)
    assert not scheduler.settle(args, None, LaunchPlan([]))
    assert args.additional_config == {"a": 1}


def test_counters_have_a_directory_while_our_scheduler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pytest.importorskip("prometheus_client").values
    monkeypatch.delenv(scheduler.METRICS_ENV, raising=False)
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    with scheduler.counted(LaunchPlan(["--model", "m"])):
        assert scheduler.METRICS_ENV not in os.environ
    with scheduler.counted(LaunchPlan([scheduler.SCHEDULER_FLAG, SCHEDULER_CLS])):
        place = Path(os.environ[scheduler.METRICS_ENV])
        assert place.is_dir()
    assert not place.exists() and scheduler.METRICS_ENV not in os.environ
