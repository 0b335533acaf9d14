"""`serve`: from a model's name to a server that has answered one real token, by the fastest way that its bundle allows.

Compatibility is decided from the manifest before anything heavy is imported. A way that cannot be taken is replaced by the
next one, down to vLLM's ordinary start, and every step down is named in the server's `fallbacks`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from coldstart import keys, models, paths, timeline
from coldstart.artifacts.bundle import Bundle, Trust
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Key, Mismatch
from coldstart.artifacts.store import NotFound, Store
from coldstart.engine import handoff, launch, pool, prepare
from coldstart.engine.plan import LaunchPlan
from coldstart.errors import NoBundle
from coldstart.models import Model

MODES = ("fresh", "template-runtime", "template-engine", "snapshot")


@dataclass(frozen=True)
class Request:
    """What the user asked for. `mode` is one of MODES or "auto"; `trust` judges whose code may run here."""

    model: str
    vllm_args: Sequence[str] = ()
    mode: str = "auto"
    revision: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    ready_timeout: float | None = None
    trust: Trust | None = None


@dataclass
class Found:
    """A model and the bundle that fits it here, or why none does."""

    model: Model
    key: Key
    bundle: Bundle | None
    nearest: Bundle | None = None
    mismatches: Sequence[Mismatch] = ()

    def why(self) -> str:
        """The miss in one line a field: wanted and found."""
        if not self.mismatches:
            return f"no bundle for {self.model.name} (key {self.key.short})"
        fields = [f"{m.field}: wanted {m.wanted}, found {m.found}" for m in self.mismatches]
        return f"no bundle of {self.model.name} fits; the nearest differs in " + "; ".join(fields)


@dataclass
class Start:
    """A started server: how it was asked for, how it came up."""

    mode: str
    plan: LaunchPlan
    running: launch.Running
    steps: list[dict[str, str]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The ready file: mode, pid, seconds, and the server's own account of its fast path."""
        report = self.running.report
        return {
            "pid": self.running.process.pid,
            "mode": self.mode,
            "ready_s": round(self.running.ready_s, 4),
            "first_token_s": round(self.running.ready_s, 4),
            "fast_path": {"mode": not self.steps, **report.get("fast_path", {})},
            "fallbacks": [*self.steps, *report.get("fallbacks", [])],
            "canary": report.get("canary"),
            "tokens": report.get("tokens"),
        }


def find(request: Request) -> Found:
    """Resolve the model, compose its key on this machine and look it up.

    Raises what `models.resolve` and `keys.compose_argv` raise.
    """
    model = models.resolve(
        request.model, revision=request.revision, offline=request.offline, cache_dir=request.cache_dir
    )
    key = keys.compose_argv(model, request.vllm_args)
    try:
        return Found(model, key, Store(paths.store_dir(request.cache_dir)).find(key, name=model.name))
    except NotFound as miss:
        nearest, mismatches = miss.nearest or (None, [])
        return Found(model, key, None, nearest, mismatches)


def plan_for(request: Request, found: Found) -> LaunchPlan:
    """The plan from the found bundle. Raises NoBundle when there is none: the caller decides what a miss means."""
    model = models.ensure_weights(found.model, offline=request.offline)
    if found.bundle is None:
        raise NoBundle(found.why(), mend=f"coldstart materialize {found.model.name}")
    trust = request.trust or host_trust
    return prepare.prepare(found.bundle, model, request.vllm_args, cache_dir=request.cache_dir, trust=trust)


def ordinary_plan(request: Request, found: Found) -> LaunchPlan:
    """vLLM's ordinary start of the same model, for want of a bundle."""
    model = models.ensure_weights(found.model, offline=request.offline)
    return prepare.ordinary(model, request.vllm_args, request.cache_dir, found.key.digest, found.why())


def host_trust(bundle: Bundle) -> Any:
    """Trust what was made on this machine, and what a key that the user trusts has signed."""
    from coldstart.artifacts import sign

    return sign.trusted(bundle, paths.trust_dir())


def start(request: Request, found: Found, plan: LaunchPlan) -> Start:
    """Start the server by the asked mode, stepping down where it cannot be taken, and wait until it is ready.

    Raises Failed when the server dies or is not ready in time.
    """
    began = timeline.now()
    steps: list[dict[str, str]] = []
    for mode in _ladder(request.mode):
        try:
            process, reader = _launch(mode, request, found, plan)
        except (handoff.HandoffError, BundleError, _Unavailable) as error:
            if request.mode != "auto":
                steps.append({"section": mode, "reason": str(error)})
            continue
        with ending(process):
            running = launch.acknowledged(process, reader, began, request.ready_timeout)
        return Start(mode, plan, running, steps)
    raise AssertionError("the ladder ends with fresh, which is always there")


class _Unavailable(RuntimeError):
    """This mode cannot be taken now; the message says why."""


def _ladder(mode: str) -> Sequence[str]:
    order = ("template-engine", "template-runtime", "fresh")
    return order if mode == "auto" else tuple(dict.fromkeys((mode, "fresh")))


def _launch(mode: str, request: Request, found: Found, plan: LaunchPlan) -> tuple[launch.Process, int]:
    if mode == "fresh":
        return launch.fresh(plan)
    if mode == "snapshot":
        return _thaw(request, found, plan)
    warm = pool.find(mode.removeprefix("template-"), found.key.digest)
    if warm is None:
        raise _Unavailable(f"no {mode} runs for {found.model.name}: coldstart template start {found.model.name}")
    return launch.forked(plan, warm.socket)


def _thaw(request: Request, found: Found, plan: LaunchPlan) -> tuple[launch.Process, int]:
    from coldstart.engine import snapshot

    if found.bundle is None or not found.bundle.has("snapshot"):
        raise _Unavailable("the bundle has no snapshot: coldstart materialize MODEL --snapshot")
    try:
        socket_path, guardian = snapshot.thaw(found.bundle, request.cache_dir, request.trust or host_trust)
    except snapshot.Unusable as error:
        raise _Unavailable(str(error)) from error
    return launch.forked(plan, socket_path, guardian)


@contextmanager
def ending(process: launch.Process) -> Iterator[None]:
    """End the server if the block is left by an exception (Ctrl-C included)."""
    try:
        yield
    except BaseException:
        if process.poll() is None:
            process.signal(signal.SIGTERM)
            process.wait()
        raise


def forward_signals(process: launch.Process) -> Callable[[], int | None]:
    """Pass SIGINT and SIGTERM on to the server; the returned function tells which one came first, if any."""
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if number == signal.SIGINT and len(caught) == 1 else number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    return lambda: caught[0] if caught else None
