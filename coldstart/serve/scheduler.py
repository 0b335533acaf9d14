"""From the choice of a scheduler to vLLM's own flags, and back to vLLM's scheduler where ours cannot run.

Invariant: a choice never enters the bundle's key. The order of requests, the batch cap and KV copies on the host change neither
compiled code nor weights nor the size of the KV cache, so one bundle and one template serve every scheduler.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.contract import environment
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import Usage
from coldstart.key import arguments

# The policies are imported where they are needed: a start with vLLM's own scheduler does without them.
if TYPE_CHECKING:
    from coldstart.vllm.scheduling.config import SchedulerSettings

FCFS = "fcfs"
SCHEDULER_FLAG = "--scheduler-cls"
METRICS_ENV = environment.PROMETHEUS_MULTIPROC_DIR
DEFAULT_HOST_BYTES = 1 << 30
# Flags by which the scheduler is told to vLLM: a choice and they exclude each other.
_OURS = ("scheduler_cls", "additional_config", "kv_transfer_config")
_CPU_CORES = (environment.VLLM_CPU_OMP_THREADS_BIND, environment.VLLM_CPU_NUM_OF_RESERVED_CPU)


@dataclass(frozen=True)
class Choice:
    """A scheduler and its settings; None leaves a setting at its default (config.SchedulerSettings, the bundle's profile).

    `batch` is the largest number of requests per iteration, times are seconds, `host_bytes` of host memory keep the KV of
    requests that were taken off the device.
    """

    policy: str = FCFS
    batch: int | None = None
    quantum_s: float | None = None
    eta: int | None = None
    alpha_s: float | None = None
    oldest_share: float | None = None
    reserve: float | None = None
    strategy: str | None = None
    host_bytes: int | None = None

    def settings(self, profile: Mapping[str, object] | None) -> SchedulerSettings:
        """Our scheduler's settings. Raises Usage for a value out of range."""
        from coldstart.vllm.scheduling.config import SchedulerSettings

        given = {
            "batch": self.batch,
            "first_quantum_s": self.quantum_s,
            "eta": self.eta,
            "alpha_s": self.alpha_s,
            "oldest_share": self.oldest_share,
            "reserve_quantile": self.reserve,
            "strategy": self.strategy,
            "profile": profile,
        }
        made = SchedulerSettings(policy=self.policy, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        try:
            return SchedulerSettings.read(made.additional_config())
        except ValueError as problem:
            raise Usage(f"The scheduler's settings: {problem}.", mend="coldstart serve --help") from problem


STOCK = Choice()
"""vLLM's own scheduler, as it is."""


def check(choice: Choice, vllm_args: Sequence[str]) -> None:
    """Raises Usage where `vllm_args` choose another scheduler or a setting is wrong."""
    if choice.policy == FCFS:
        return _only_batch(choice)
    given = arguments.parse(vllm_args)
    if taken := [name for name in _OURS if name in given]:
        flag = "--" + taken[0].replace("_", "-")
        raise Usage(
            f"--scheduler {choice.policy} sets {flag} itself.", mend=f"leave {flag} or --scheduler away"
        )
    choice.settings(None)
    return None


def apply(
    made: LaunchPlan, choice: Choice, bundle: Bundle | None, vllm_args: Sequence[str], *, on_cpu: bool
) -> LaunchPlan:
    """The plan with the chosen scheduler. Raises as `check`."""
    check(choice, vllm_args)
    if choice.policy == FCFS:
        return replace(made, vllm_args=[*made.vllm_args, *_batch_cap(choice.batch)])
    from coldstart.vllm.scheduling.arguments import serve_arguments

    profile, fallbacks = _profile(bundle)
    settings = choice.settings(profile)
    flags = serve_arguments(settings, choice.host_bytes or _host_bytes(bundle), on_cpu=on_cpu)
    env = _cores(arguments.parse(vllm_args)) if on_cpu and "--kv-transfer-config" in flags else {}
    return replace(
        made,
        vllm_args=[*made.vllm_args, *flags],
        env=made.env | env,
        fallbacks=[*made.fallbacks, *fallbacks],
    )


def settle(args: Namespace, config: Any, plan: LaunchPlan) -> bool:
    """Take our scheduler out of `args` where this vLLM cannot run it, with the reason in the plan's fallbacks.

    Returns whether it did: `config` is then to be made again.
    """
    if not args.scheduler_cls:
        return False
    from coldstart.vllm.scheduling import SCHEDULER_CLS

    reason = _obstacle(config) if args.scheduler_cls == SCHEDULER_CLS else None
    if reason is None:
        return False
    plan.fallbacks.append({"section": "scheduler", "reason": f"{reason} vLLM's own scheduler runs instead."})
    args.scheduler_cls, args.additional_config, args.kv_transfer_config = None, {}, None
    return True


@contextmanager
def counted(plan: LaunchPlan) -> Iterator[None]:
    """Have the engine process's counters appear in the server's /metrics while our scheduler runs.

    prometheus_client carries values across processes by files in one directory, which is removed at the end.
    """
    if SCHEDULER_FLAG not in plan.vllm_args or METRICS_ENV in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="coldstart-metrics-", ignore_cleanup_errors=True) as directory:
        os.environ[METRICS_ENV] = directory
        # A template has imported the library before the directory was known.
        from prometheus_client import values

        values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            del os.environ[METRICS_ENV]


def _only_batch(choice: Choice) -> None:
    if choice != Choice(batch=choice.batch):
        raise Usage(
            "fcfs takes --batch alone: the other settings belong to --scheduler skip-join-mlfq.",
            mend="add --scheduler skip-join-mlfq",
        )


def _batch_cap(batch: int | None) -> list[str]:
    return [] if batch is None else ["--max-num-active-seqs", str(batch)]


def _profile(bundle: Bundle | None) -> tuple[Mapping[str, object] | None, list[dict[str, str]]]:
    """The bundle's iteration times, checked."""
    from coldstart.scheduling.profile import IterationProfile, ProfileError

    try:
        if bundle is not None and bundle.has("iterations"):
            return IterationProfile.from_json(bundle.json("iterations")).to_json(), []
        reason = "there are no iteration times for this model: a typical shape orders the requests"
    except (ProfileError, BundleError) as problem:
        reason = f"{problem}: a typical shape orders the requests"
    return None, [{"section": "iterations", "reason": reason}]


def _host_bytes(bundle: Bundle | None) -> int:
    """As much host memory as the device has for KV."""
    try:
        sizing = bundle.json("kv") if bundle is not None and bundle.has("kv") else None
    except BundleError:
        sizing = None
    size = sizing.get("bytes") if isinstance(sizing, Mapping) else None
    return size if isinstance(size, int) and size > 0 else DEFAULT_HOST_BYTES


def _cores(given: Mapping[str, object]) -> dict[str, str]:
    """vLLM reserves one more core per rank as soon as KV is transferred; our copying needs none of its own."""
    if any(name in os.environ for name in _CPU_CORES):
        return {}
    return {environment.VLLM_CPU_NUM_OF_RESERVED_CPU: str(given.get("tensor_parallel_size", 1))}


def _obstacle(config: Any) -> str | None:
    try:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import Request

        from coldstart.vllm.scheduling import compat

        compat.check(AsyncScheduler.__mro__[1], Request, config)
        import coldstart.vllm.scheduling.scheduler  # noqa: F401
    except Exception as problem:  # noqa: BLE001 - whatever a strange vLLM raises here, the server must start
        return f"{problem}".replace("Serve with --scheduler fcfs.", "").strip()
    return None
