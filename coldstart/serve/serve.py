"""`serve`: from a model's name to a server that has answered one real token, by the fastest way that its bundle allows.

Compatibility is decided from the manifest before anything heavy is imported. A way that cannot be taken is replaced by the
next one, down to vLLM's ordinary start, and every step down is named in the server's `fallbacks`.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.bundle import Trust
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.net.origin import without_secrets
from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import PacedFetch
from coldstart.errors import Usage
from coldstart.key import inspection
from coldstart.key.inspection import Lookup
from coldstart.machine import addresses, modes, peers, runtime, scratch, timeline
from coldstart.model import models
from coldstart.scheduling.settings import Choice
from coldstart.serve import fetch, interrupted, launch, prepare, scheduler, template_pool, unserved
from coldstart.serve.scheduler import STOCK

if TYPE_CHECKING:
    from coldstart.serve import process_snapshot
    from coldstart.weights.prefetch.client import Attached

DEFAULT_PORT = 8000
# The fastest first.
LADDER = ("standby", "template-engine", "snapshot", "template-runtime", "runtime-snapshot", "fresh")
# A step down that leaves the start as fast as it was.
FETCH_REST = "fetch-rest"


@dataclass(frozen=True)
class ServeRequest:
    """What the user asked for, and what there is for it.

    `listen` are vLLM's host and port arguments, `mode` is one of LADDER or "auto", `without_bundle` starts vLLM's ordinary way
    where there is none, `trust` judges whose code may run here; with `require_signature` a bundle it does not accept is
    refused as a whole, otherwise only its code is left alone. `weights_from` is where the weights are fetched from (None: the
    model's own directory), by `weights_pace` if there is one; with `fetch_rest` those that this node's pipeline ranks do not
    need follow in the background.
    """

    lookup: Lookup
    listen: Sequence[str] = ()
    mode: str = "auto"
    without_bundle: bool = False
    ready_timeout: float | None = None
    require_signature: bool = False
    scheduler: Choice = STOCK
    trust: Trust = inspection.trust
    weights_from: str | None = None
    weights_pace: PacedFetch | None = None
    fetch_rest: bool = False
    accepts: Trust | None = None
    templates: Path | None = None


@dataclass
class StartedServer:
    """A started server: how it was asked for, how it came up.

    `steps` name each faster mode that was there and could not be taken, `absent` those that there are not. `rest` and `ahead`
    are what is fetched still.
    """

    mode: str
    plan: LaunchPlan
    running: launch.Running
    steps: list[Fallback] = field(default_factory=list)
    absent: list[Fallback] = field(default_factory=list)
    rest: Attached | None = None
    began: float = 0.0
    ahead: fetch.Ahead | None = None

    def document(self) -> dict[str, Any]:
        """The ready file: mode, pid, seconds, and the server's own account of its fast path."""
        report = self.running.report
        return {
            "pid": self.running.process.pid,
            "mode": self.mode,
            "ready_s": round(self.running.ready_s, 4),
            "first_token_s": round(self.running.ready_s, 4),
            "fast_path": {
                "mode": all(step.stage == FETCH_REST for step in self.steps),
                **report.get("fast_path", {}),
            },
            "fallbacks": [*fallback.to_json(self.steps), *report.get("fallbacks", [])],
            "absent": fallback.to_json(self.absent),
            "canary": report.get("canary"),
            "tokens": report.get("tokens"),
            "loads": report.get("loads", []),
        }


def plan(request: ServeRequest) -> LaunchPlan:
    """The plan of the start that was asked for, its scheduler checked. Raises NoBundle where one is needed."""
    lookup = request.lookup
    signed_by = request.trust if request.require_signature else None
    inspection.require(lookup, bundle=not request.without_bundle, signed_by=signed_by)
    launch_plan = _prepared(request)
    return scheduler.apply(launch_plan, request.scheduler, lookup.bundle, on_cpu=runtime.targets_cpu())


def _prepared(request: ServeRequest) -> LaunchPlan:
    lookup, donor = request.lookup, request.lookup.weights_donor
    streamed = None
    if donor and request.weights_from:
        streamed = fetch.Streamed.of(donor, request.weights_from, request.weights_pace)
    ensure = models.ensure_weights if streamed is None else models.ensure_tokenizer
    lookup = replace(lookup, model=ensure(lookup.model, offline=lookup.offline))
    if lookup.bundle is None:
        launch_plan = prepare.ordinary(lookup, request.listen, streamed)
    else:
        launch_plan = prepare.prepare(
            lookup, lookup.bundle, request.listen, trust=request.trust, streamed=streamed
        )
    launch_plan.fallbacks.extend(unserved.fallbacks(launch_plan.vllm_args))
    if request.weights_from is not None and streamed is None:
        reason = f"no bundle says what {without_secrets(request.weights_from)} must hold: the model's own directory is read"
        launch_plan = replace(launch_plan, fallbacks=[*launch_plan.fallbacks, Fallback("weights", reason)])
    return launch_plan


def url(plan: LaunchPlan) -> str:
    """Where the planned server will answer."""
    given = plan.vllm_args
    if uds := given.value("uds"):
        return f"unix:{uds}"
    host = str(given.value("host") or "127.0.0.1")
    scheme = "https" if given.value("ssl_certfile") else "http"
    return addresses.url(host, given.value("port", DEFAULT_PORT), scheme)


def start(request: ServeRequest, plan: LaunchPlan) -> StartedServer:
    """Start the server by the asked mode, stepping down where it cannot be taken, and wait until it is ready.

    Raises CommandFailed when the server dies or is not ready in time.
    """
    began, config = timeline.now(), request.lookup.model.config
    steps = interrupted.cleared(Path(plan.env["VLLM_CACHE_ROOT"])) if "VLLM_CACHE_ROOT" in plan.env else []
    absent: list[Fallback] = []
    for mode in _ladder(request.mode):
        with fetch.begun(mode, plan, config) as ahead:
            try:
                running = _run(mode, request, plan, began)
                ahead.started()
            except _Absent as reason:
                (absent if request.mode == "auto" else steps).append(_step(mode, reason))
                continue
            except (peers.PeerError, BundleError, _Unavailable) as reason:
                steps.append(_step(mode, reason))
                continue
            except launch.Died as reason:
                if mode == "fresh":
                    return _without_the_untrusted(request, reason, steps, absent, began)
                steps.append(_step(mode, reason))
                continue
        if running.report.get("canary") is not False:
            started = StartedServer(mode, plan, running, steps, absent, began=began, ahead=ahead)
            return _with_rest(started, request)
        running.process.wait()
        wrong = (
            f"a {mode} start did not answer the bundle's canary with its token: started without the bundle"
        )
        steps.append(Fallback("canary", wrong))
        plain = prepare.distrusting(plan)
        running = _run("fresh", request, plain, began)
        return _with_rest(StartedServer("fresh", plain, running, steps, absent, began=began), request)
    raise AssertionError("the ladder ends with fresh, which is always there")


def _without_the_untrusted(
    request: ServeRequest,
    died: launch.Died,
    steps: list[Fallback],
    absent: list[Fallback],
    began: float,
) -> StartedServer:
    """Once more without a bundle that nobody trusted has signed: its plain sections decide over no start. Raises `died`."""
    lookup = request.lookup
    if lookup.bundle is None or request.trust(lookup.bundle).ok:
        raise died
    reason = f"{died.message} Nobody trusted has signed {lookup.bundle.ref}: left out."
    steps.append(Fallback("bundle", reason))
    ordinary = replace(
        request, lookup=replace(lookup, bundle=None, untrusted=lookup.bundle), without_bundle=True
    )
    plain = plan(ordinary)
    running = _run("fresh", ordinary, plain, began)
    return _with_rest(StartedServer("fresh", plain, running, steps, absent, began=began), request)


def _step(mode: str, reason: Exception) -> Fallback:
    return Fallback(mode, str(reason))


def _run(mode: str, request: ServeRequest, plan: LaunchPlan, began: float) -> launch.Running:
    process, reader = _launch(mode, request, plan)
    with ending(process):
        return launch.acknowledged(process, reader, began, request.ready_timeout)


def _with_rest(started: StartedServer, request: ServeRequest) -> StartedServer:
    if not request.fetch_rest:
        return started
    from coldstart.weights.prefetch.errors import PrefetchError

    try:
        return replace(started, rest=fetch.rest(started.plan, request.lookup.model.config))
    except (PrefetchError, OSError, ValueError) as error:
        started.steps.append(_step(FETCH_REST, error))
        return started


class _Unavailable(RuntimeError):
    """This mode cannot be taken now; the message says why."""


class _Absent(_Unavailable):
    """There is no such mode for this model here: nobody has made it."""


def _ladder(mode: str) -> Sequence[str]:
    return LADDER if mode == "auto" else tuple(dict.fromkeys((mode, "fresh")))


def _launch(mode: str, request: ServeRequest, plan: LaunchPlan) -> tuple[launch.ServerProcess, int]:
    if mode == "fresh":
        return launch.fresh(plan)
    if refused := modes.refusal(mode):
        raise _Absent(f"{refused.reason}: {refused.mend}")
    if mode in ("snapshot", "runtime-snapshot"):
        return _thaw(mode, request, plan)
    levels = tuple(modes.SLEEP_LEVELS) if mode == "standby" else (mode.removeprefix("template-"),)
    key, roots = request.lookup.key.digest, dict.fromkeys((request.templates, None))
    try:
        found = (template_pool.find(level, key, root) for level in levels for root in roots)
        if (warm := next(filter(None, found), None)) is None:
            raise _no_template(mode, levels, request.lookup)
    except (OSError, Usage) as error:  # no private place, or no room, where they would listen
        raise _Unavailable(str(error)) from error

    def judge() -> None:
        if (reason := template_pool.obstacle(warm, plan)) is not None:
            raise _Unavailable(f"{reason}: coldstart template stop, and start it again")

    return launch.forked(plan, warm.socket, judge=judge)


def _no_template(mode: str, levels: Sequence[str], lookup: Lookup) -> _Unavailable:
    name, key = lookup.model.name, lookup.key.digest
    for warm in template_pool.listed():
        fits = warm.level == "runtime" or warm.key == key
        if warm.level in levels and warm.python == sys.executable and fits:
            state = "is not ready yet" if warm.pid else "has died: coldstart template stop"
            return _Unavailable(f"the {mode} of {warm.model} {state}")
    return _Absent(f"no {mode} runs for {name}: coldstart template start {name} --level {levels[0]}")


def _thaw(mode: str, request: ServeRequest, plan: LaunchPlan) -> tuple[launch.ServerProcess, int]:
    from coldstart.serve import process_snapshot

    try:
        if mode == "snapshot":
            plan, thawed = replace(plan, must_adopt=True), _thawed_engine(request, plan)
        else:
            thawed = _thawed_runtime(request, plan)
    except (process_snapshot.SnapshotUnusable, Usage, OSError, LookupError, ValueError, TypeError) as error:
        # Whatever is wrong with an image, or with the place it is unpacked to, another mode starts the server.
        raise _Unavailable(f"{error}") from error
    try:
        return launch.forked(plan, thawed.socket, thawed)
    except BaseException:
        thawed.end()
        raise


def _thawed_engine(request: ServeRequest, plan: LaunchPlan) -> process_snapshot.Thawed:
    from coldstart.serve import process_snapshot

    bundle = request.lookup.bundle
    if bundle is None or not bundle.has("snapshot"):
        raise _Absent("the bundle has no snapshot: coldstart materialize MODEL --snapshot")
    return process_snapshot.thaw(bundle, plan, request.lookup.cache, request.trust)


def _thawed_runtime(request: ServeRequest, plan: LaunchPlan) -> process_snapshot.Thawed:
    from coldstart.serve import process_snapshot, runtime_snapshot

    image = runtime_snapshot.made(request.lookup.cache)
    if image is None:
        raise _Absent("no runtime is frozen here: coldstart template freeze")
    try:
        return runtime_snapshot.thaw(image, plan)
    except process_snapshot.SnapshotUnusable as error:
        raise _Unavailable(f"{error}: coldstart template freeze makes it anew") from error


@contextmanager
def ending(process: launch.ServerProcess) -> Iterator[None]:
    """End the server if the block is left by an exception (Ctrl-C included)."""
    try:
        yield
    except BaseException:
        if process.poll() is None:
            process.signal(signal.SIGTERM)
            process.wait()
        _sweep(process)
        raise


def stay(process: launch.ServerProcess) -> int:
    """Live as long as the server, passing SIGINT and SIGTERM on; the exit code that this process should end with.

    130 or 143 when a signal ended it; 1 when it ended by itself, whatever it said: a server is not expected to.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if len(caught) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    with _woken() as reader:
        ended, watched = process.fileno(), [process.fileno(), reader]
        while ended not in select.select(watched, [], [])[0]:
            with suppress(BlockingIOError):
                os.read(reader, 512)
    process.wait()
    _sweep(process)
    return 128 + caught[0] if caught else 1


@contextmanager
def _woken() -> Iterator[int]:
    """A descriptor that is readable after a signal: one that comes just before a wait begins would not end it."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _sweep(process: launch.ServerProcess) -> None:
    with suppress(OSError, Usage):
        resident = Path(f"/proc/{process.pid}").exists()  # an engine that sleeps again keeps its own
        scratch.sweep(None if resident else process.pid)  # where it was killed it has left its directory
