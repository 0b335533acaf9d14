"""Measure one run of a server: time to the first token, CPU time, memory, responses and steady state.

CPU times are read right after the first token, before further requests, so that they cover the start alone. The start is
divided into the five stages of MEDUSA (section 2.2). The duration of a stage is the length of the union of its spans, so
overlapping spans count once, and a skipped stage takes 0 s. Compilation, which the paper does not cover, counts toward
the stage in which vLLM compiles: `KV` or `capture`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from coldstart.launch.completions import CompletionClient
from coldstart.system.proc import processes
from coldstart.system.timeline import Span, Timeline
from coldstart.validate.launch import HOST, LaunchedServer, Launcher, run_server
from coldstart.validate.responses import ALONE, Response, complete_prompts

HARNESS_TRACK = "harness"
LISTENING, ANSWERING = "until listening", "first request"
CONCURRENCY = 8
SINGLE_REQUESTS = 3
STAGE_SPANS: Mapping[str, frozenset[str]] = {
    "structure": frozenset({"construct model"}),
    "weights": frozenset({"load the model", "load weights", "read tensors", "wake the engine"}),
    "tokenizer": frozenset({"load the tokenizer"}),
    "KV": frozenset({"compile the model or size the KV cache", "allocate the KV cache"}),
    "capture": frozenset({"compile or warm up", "warm up", "restore compiled forward"}),
}
REST = "rest"
STAGES = (*STAGE_SPANS, REST)


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run. `ready_timeout_s` limits the time from launch to first token, in seconds."""

    prompts: Sequence[str]
    max_tokens: int = 64
    ready_timeout_s: float = 900.0
    measure_steady_state: bool = True


@dataclass(frozen=True)
class SteadyState:
    """Steady state of a server: latency of one request in seconds, and throughput at CONCURRENCY."""

    latency_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class MeasuredRun:
    """One measured start. Times are in seconds since the launch."""

    mode: str
    round: int
    first_token_s: float
    cpu_s: float
    pss_bytes: int
    phases: Mapping[str, float]
    stages: Mapping[str, float]
    spans: Sequence[Mapping[str, object]]
    responses: Sequence[Response]
    steady: SteadyState | None = None
    readiness: Mapping[str, object] = field(default_factory=dict)


def run(launcher: Launcher, directory: Path, settings: RunSettings, index: int) -> MeasuredRun:
    """Start a server once, measure it, and stop it even after an error.

    Raises:
        ServerExitedError: The server exited.
        CommandFailedError: The server returned no token in time or did not answer a request.
    """
    cpu_before = read_cpu_s()
    with run_server(launcher, directory) as server:
        return measure(launcher, server, settings, index, cpu_before)


def measure(
    launcher: Launcher,
    server: LaunchedServer,
    settings: RunSettings,
    index: int,
    cpu_before: Mapping[psutil.Process, float],
) -> MeasuredRun:
    """Measure a launched server. `cpu_before` is the result of `read_cpu_s` before the launch.

    Raises the errors of `run`, and CompletionFailedError.
    """
    client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
    deadline_s = server.launched_s + settings.ready_timeout_s
    first = client.await_first_token(settings.prompts[0], deadline_s=deadline_s, check=server.check_alive)
    readiness = (
        server.read_readiness()
    )  # before `processes`: it may report a server outside the command's process tree
    start_processes = {*server.list_processes(), *_list_woken_processes(readiness.get("pid"))}
    cpu_s = _measure_cpu_s(start_processes, cpu_before)
    pss = processes.measure_pss_bytes([process.pid for process in start_processes])
    listening = Span(LISTENING, server.launched_s, first.connected_at_s, HARNESS_TRACK)
    harness = Timeline(
        [listening, Span(ANSWERING, first.connected_at_s, first.first_token_at_s, HARNESS_TRACK)]
    )
    reported_spans = _read_reported_spans(server)
    return MeasuredRun(
        mode=launcher.mode,
        round=index,
        first_token_s=first.first_token_at_s - server.launched_s,
        cpu_s=cpu_s,
        pss_bytes=pss,
        phases=harness.sum_phases() | reported_spans.sum_phases(),
        stages=measure_stages(reported_spans.spans, server.launched_s, first.first_token_at_s),
        spans=Timeline([*harness.spans, *reported_spans.spans]).describe_spans(server.launched_s),
        responses=complete_prompts(client, settings.prompts, settings.max_tokens, ALONE),
        steady=measure_steady_state(client, settings.prompts, settings.max_tokens)
        if settings.measure_steady_state
        else None,
        readiness=readiness,
    )


def _read_reported_spans(server: LaunchedServer) -> Timeline:
    """Return the spans that the server reported, without those of a template or snapshot that ended before this launch."""
    if not server.files.events_file.exists():
        return Timeline()
    spans = Timeline.read(server.files.events_file).spans
    return Timeline(span for span in spans if span.end_s > server.launched_s)


def measure_steady_state(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> SteadyState:
    """Measure the steady state of a warm server. Raises CompletionFailedError if a request fails."""
    alone = [client.complete(prompts[0], max_tokens).seconds for _ in range(SINGLE_REQUESTS)]
    requests = [prompts[i % len(prompts)] for i in range(2 * CONCURRENCY)]
    began_s = time.monotonic()
    answers = client.complete_all(requests, max_tokens, CONCURRENCY)
    produced = sum(len(answer.tokens) or max_tokens for answer in answers)
    return SteadyState(median(alone), produced / (time.monotonic() - began_s))


def read_cpu_s(processes: Iterable[psutil.Process] | None = None) -> dict[psutil.Process, float]:
    """Return the CPU seconds of processes, including their reaped children. None means all processes on the machine."""
    cpu_s_by_process = dict[psutil.Process, float]()
    for one in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error):
            cpu_s_by_process[one] = sum(one.cpu_times()[:4])
    return cpu_s_by_process


def _list_woken_processes(pid: object) -> set[psutil.Process]:
    """Return the processes of the server `pid`, which are older than its start if it is a woken engine."""
    if isinstance(pid, int):
        with suppress(psutil.Error):
            server = psutil.Process(pid)
            return {server, *server.children(recursive=True)}
    return set()


def _measure_cpu_s(start_processes: set[psutil.Process], cpu_before: Mapping[psutil.Process, float]) -> float:
    """Return the CPU seconds of a start: those of its processes, and those that its parents used since `cpu_before`."""
    parents = {
        parent
        for one in start_processes
        if (parent := one.parent()) is not None and parent.pid not in (1, os.getpid())
    }
    cpu_s_by_process = read_cpu_s({*start_processes, *parents})
    return sum(cpu_s_by_process.values()) - sum(cpu_before.get(one, 0.0) for one in cpu_s_by_process)


def measure_stages(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of each stage, and of the remaining time, between `begin_s` and `end_s`, or {} if there are no spans.

    vLLM constructs the model within its weight-loading span, and that time counts only toward `structure`.
    """
    spans = list(spans)
    if not spans:
        return {}
    intervals_by_stage = {
        stage: [(max(s.start_s, begin_s), min(s.end_s, end_s)) for s in spans if s.name in names]
        for stage, names in STAGE_SPANS.items()
    }
    structure_and_weights_s = _union_length(
        [*intervals_by_stage["structure"], *intervals_by_stage["weights"]]
    )
    seconds = {stage: _union_length(intervals) for stage, intervals in intervals_by_stage.items()}
    seconds["weights"] = structure_and_weights_s - seconds["structure"]
    covered = _union_length([interval for intervals in intervals_by_stage.values() for interval in intervals])
    return seconds | {REST: end_s - begin_s - covered}


def _union_length(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
