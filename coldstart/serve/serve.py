"""`serve`: from a model's name to a server that has answered one real token, by the fastest way that its bundle allows.

Compatibility is decided from the manifest before anything heavy is imported. A way that cannot be taken is replaced by the
next one, down to vLLM's ordinary start, and every step down is named in the server's `fallbacks`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.bundle import Bundle, Trust
from coldstart.artifacts.errors import BundleError
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import Failed
from coldstart.key import arguments, inspection
from coldstart.key.inspection import Lookup
from coldstart.machine import peers, runtime, timeline
from coldstart.model import models
from coldstart.serve import fetch, launch, pool, prepare, scheduler
from coldstart.serve.scheduler import STOCK, Choice

if TYPE_CHECKING:
    from coldstart.materialize.assembly import Phase
    from coldstart.weights.prefetch.client import Attached

DEFAULT_PORT = 8000
# A step down that leaves the start as fast as it was.
FETCH_REST = "fetch-rest"
MODES = ("fresh", "template-runtime", "template-engine", "snapshot")


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    `listen` are vLLM's host and port arguments, `mode` is one of MODES or "auto", `on_miss` fail, warn or materialize,
    `trust` judges whose code may run here; with `require_signature` a bundle it does not accept is refused as a whole,
    otherwise only its code is left alone. `weights_from` is where the weights are fetched from (None: the model's own
    directory); with `fetch_rest` those that this node's pipeline ranks do not need follow in the background.
    """

    model: str
    vllm_args: Sequence[str] = ()
    listen: Sequence[str] = ()
    mode: str = "auto"
    on_miss: str = "fail"
    revision: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    ready_timeout: float | None = None
    require_signature: bool = False
    scheduler: Choice = STOCK
    trust: Trust = inspection.trust
    weights_from: str | None = None
    fetch_rest: bool = False


@dataclass
class Start:
    """A started server: how it was asked for, how it came up."""

    mode: str
    plan: LaunchPlan
    running: launch.Running
    steps: list[dict[str, str]] = field(default_factory=list)
    rest: Attached | None = None
    began: float = 0.0

    def document(self) -> dict[str, Any]:
        """The ready file: mode, pid, seconds, and the server's own account of its fast path."""
        report = self.running.report
        return {
            "pid": self.running.process.pid,
            "mode": self.mode,
            "ready_s": round(self.running.ready_s, 4),
            "first_token_s": round(self.running.ready_s, 4),
            "fast_path": {
                "mode": all(step["section"] == FETCH_REST for step in self.steps),
                **report.get("fast_path", {}),
            },
            "fallbacks": [*self.steps, *report.get("fallbacks", [])],
            "canary": report.get("canary"),
            "tokens": report.get("tokens"),
            "loads": report.get("loads", []),
        }


def plan(request: Request, phase: Phase) -> tuple[Lookup, LaunchPlan]:
    """What the store has for the request, and the plan made of it, after dealing with a miss as it asks.

    Raises Usage for a scheduler that cannot be, NoBundle on a miss with `on_miss` fail, and what `materialize` raises.
    """
    scheduler.check(request.scheduler, request.vllm_args)
    found = inspection.look_up_for(request)
    if request.weights_from is not None:
        found = fetch.without_weights(found)
    if found.bundle is None and request.on_miss == "materialize":
        from coldstart.materialize import materialize

        offline = materialize.Request(
            request.model,
            request.vllm_args,
            revision=request.revision,
            offline=request.offline,
            cache_dir=request.cache_dir,
        )
        found = replace(found, bundle=materialize.materialize(offline, phase), mismatches=())
    if found.bundle is None and request.on_miss == "fail":
        raise inspection.miss(found)
    if found.bundle is not None and request.require_signature:
        _require_signature(found.bundle, request.trust)
    made = _made(request, found)
    on_cpu = runtime.targets_cpu()
    return found, scheduler.apply(made, request.scheduler, found.bundle, request.vllm_args, on_cpu=on_cpu)


def _made(request: Request, found: Lookup) -> LaunchPlan:
    passed = [*request.vllm_args, *request.listen]
    known = found.bundle or fetch.donor(found)
    streamed = fetch.Streamed.of(known, request.weights_from) if known and request.weights_from else None
    ensure = models.ensure_weights if streamed is None else models.ensure_tokenizer
    model = ensure(found.model, offline=request.offline)
    if found.bundle is None:
        reason = inspection.miss(found).message
        made = prepare.ordinary(model, passed, request.cache_dir, found.key.digest, reason, streamed)
    else:
        made = prepare.prepare(
            found.bundle,
            model,
            passed,
            cache_dir=request.cache_dir,
            trust=request.trust,
            streamed=streamed,
        )
    if request.weights_from is not None and streamed is None:
        reason = f"no bundle says what {request.weights_from} must hold: the model's own directory is read"
        made = replace(made, fallbacks=[*made.fallbacks, {"section": "weights", "reason": reason}])
    return made


def _require_signature(bundle: Bundle, trust: Trust) -> None:
    judged = trust(bundle)
    if not judged.ok:
        raise Failed(
            f"{bundle.ref} is not signed by anyone trusted here: {judged.reason}.",
            mend="coldstart trust add FILE, with the signer's public key",
        )


def url(made: LaunchPlan) -> str:
    """Where the planned server will answer."""
    given = arguments.parse(made.vllm_args)
    if uds := given.get("uds"):
        return f"unix:{uds}"
    host = str(given.get("host") or "127.0.0.1")
    scheme = "https" if given.get("ssl_certfile") else "http"
    shown = f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1"}.get(host, host)
    return f"{scheme}://{shown}:{given.get('port', DEFAULT_PORT)}"


def start(request: Request, found: Lookup, made: LaunchPlan) -> Start:
    """Start the server by the asked mode, stepping down where it cannot be taken, and wait until it is ready.

    Raises Failed when the server dies or is not ready in time.
    """
    began = timeline.now()
    steps: list[dict[str, str]] = []
    for mode in _ladder(request.mode):
        with fetch.begun(mode, made, found.model.config):
            try:
                process, reader = _launch(mode, request, found, made)
            except (peers.PeerError, BundleError, _Unavailable) as error:
                if request.mode != "auto":
                    steps.append({"section": mode, "reason": str(error)})
                continue
            with ending(process):
                running = launch.acknowledged(process, reader, began, request.ready_timeout)
        if running.report.get("canary") is not False:
            rest = _rest(request, made, found, steps)
            return Start(mode, made, running, steps, rest, began)
        process.wait()
        reason = (
            f"a {mode} start did not answer the bundle's canary with its token: started without the bundle"
        )
        return _ordinary(request, made, began, [*steps, {"section": "canary", "reason": reason}])
    raise AssertionError("the ladder ends with fresh, which is always there")


def _rest(request: Request, made: LaunchPlan, found: Lookup, steps: list[dict[str, str]]) -> Attached | None:
    if not request.fetch_rest:
        return None
    from coldstart.weights.prefetch.errors import PrefetchError

    try:
        return fetch.rest(made, found.model.config)
    except (PrefetchError, OSError, ValueError) as error:
        steps.append({"section": FETCH_REST, "reason": str(error)})
        return None


def _ordinary(request: Request, made: LaunchPlan, began: float, steps: list[dict[str, str]]) -> Start:
    plain = prepare.distrusting(made)
    process, reader = launch.fresh(plain)
    with ending(process):
        running = launch.acknowledged(process, reader, began, request.ready_timeout)
    return Start("fresh", plain, running, steps)


class _Unavailable(RuntimeError):
    """This mode cannot be taken now; the message says why."""


def _ladder(mode: str) -> Sequence[str]:
    order = ("template-engine", "template-runtime", "fresh")
    return order if mode == "auto" else tuple(dict.fromkeys((mode, "fresh")))


def _launch(mode: str, request: Request, found: Lookup, made: LaunchPlan) -> tuple[launch.Process, int]:
    if mode == "fresh":
        return launch.fresh(made)
    if mode == "snapshot":
        return _thaw(request, found, made)
    warm = pool.find(mode.removeprefix("template-"), found.key.digest)
    if warm is None:
        raise _Unavailable(
            f"no {mode} runs for {found.model.name}: coldstart template start {found.model.name}"
        )
    return launch.forked(made, warm.socket)


def _thaw(request: Request, found: Lookup, made: LaunchPlan) -> tuple[launch.Process, int]:
    from coldstart.serve import snapshot

    if found.bundle is None or not found.bundle.has("snapshot"):
        raise _Unavailable("the bundle has no snapshot: coldstart materialize MODEL --snapshot")
    try:
        thawed = snapshot.thaw(found.bundle, request.cache_dir, request.trust)
    except snapshot.Unusable as error:
        raise _Unavailable(str(error)) from error
    try:
        return launch.forked(made, thawed.socket, thawed)
    except BaseException:
        thawed.end()
        raise


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


def stay(process: launch.Process) -> int:
    """Live as long as the server, passing SIGINT and SIGTERM on; the exit code that this process should end with.

    130 or 143 when a signal ended it; 1 when it ended by itself, whatever it said: a server is not expected to.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if len(caught) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    process.wait()
    return 128 + caught[0] if caught else 1
