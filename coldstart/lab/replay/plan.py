"""Trace and run of a replay from its options, live or simulated.

Invariant: trace and records are streamed; the same options and seed give the same requests in both kinds of run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.lab.replay.client import Target
from coldstart.lab.replay.http import Endpoint
from coldstart.lab.replay.open_loop import Keep, Replay, ReplaySettings, replay
from coldstart.lab.traces import TraceReport, TraceRequest, read_trace
from coldstart.lab.traces.arrivals import rearrive
from coldstart.lab.traces.formats import Columns
from coldstart.lab.traces.readers import DEFAULT_TOKENS
from coldstart.lab.traces.transform import cap_tokens, cut, map_models, sort_by_arrival, speed_up
from coldstart.scheduling import IterationProfile, SchedulerSettings


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Options for reading and transforming a trace; `rate` replaces its arrival times, None keeps them."""

    path: Path
    trace_format: str = "mooncake"
    columns: str | None = None
    strict: bool = False
    tokens: tuple[int, int] = DEFAULT_TOKENS
    speedup: float = 1.0
    duration_s: float | None = None
    limit: int | None = None
    rate: float | None = None
    cv: float = 1.0
    seed: int = 0
    models: Sequence[str] = ()
    mapping: str = "round-robin"
    max_prompt: int | None = None
    max_output: int | None = None

    def over(self, names: Sequence[str], file: Path) -> TracePlan:
        """Return this plan with the models of `file`: all of them if the plan names none.

        Raises UsageError for an unknown model.
        """
        if unknown := sorted(set(self.models) - set(names)):
            raise UsageError(
                f"{file} contains no model {', '.join(unknown)}", hint=f"its models: {', '.join(names)}"
            )
        return replace(self, models=self.models or names)

    def rows(self, report: TraceReport) -> Iterator[TraceRequest]:
        """Return the requests in order of arrival. Raises TraceError."""
        columns = Columns.parse(self.columns) if self.columns else None
        rows = read_trace(
            self.path,
            self.trace_format,
            columns=columns,
            tokens=self.tokens,
            strict=self.strict,
            report=report,
        )
        ordered = sort_by_arrival(rows)
        if self.rate is not None:
            ordered = rearrive(ordered, self.rate, self.cv, self.seed)
        kept = cut(speed_up(ordered, self.speedup), self.duration_s, self.limit)
        mapped = map_models(kept, self.models, self.mapping, self.seed)
        return cap_tokens(mapped, self.max_prompt, self.max_output)


def run_live(
    plan: TracePlan,
    urls: Sequence[str],
    model: str,
    settings: ReplaySettings,
    report: TraceReport,
    api_key: str | None,
    keep: Keep,
) -> Replay:
    """Replay against servers. Raises UsageError for an invalid URL."""
    try:
        by_row = bool(plan.models)
        targets = [
            Target(Endpoint.parse(url, "/v1/completions"), model, url, api_key, by_row=by_row) for url in urls
        ]
        return replay(plan.rows(report), targets, settings, keep=keep)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem


def run_simulated(
    plan: TracePlan,
    profile: IterationProfile,
    settings: SchedulerSettings,
    kv_blocks: int | None,
    report: TraceReport,
    keep: Keep,
) -> Replay:
    """Replay on vLLM's scheduler with `kv_blocks` on the device. Ctrl-C ends the replay and retains the finished requests.

    Raises:
        UsageError: A request never fits, or the scheduler cannot continue.
    """
    rows, ended = list(plan.rows(report)), "complete"
    if not rows:
        return Replay()
    # vLLM takes seconds to import: report a wrong trace before.
    from coldstart.lab.engine import EngineSimulator
    from coldstart.vllm.scheduling.virtual_engine import EngineResources

    machine = EngineResources() if kv_blocks is None else EngineResources(device_blocks=kv_blocks)
    if settings.host_bytes is not None:
        machine = replace(machine, host_blocks=settings.host_bytes // machine.block_bytes)
    simulator = EngineSimulator(profile, settings, machine)
    try:
        with _raising_on_ctrl_c():
            simulator.run(rows)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    except KeyboardInterrupt:
        ended = "interrupted"
    for record in simulator.records:
        if record.ok:
            keep(record)
    return Replay(duration_s=simulator.now, ended=ended)


@contextmanager
def _raising_on_ctrl_c() -> Iterator[None]:
    # The handler of the command line would end the process at once.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
