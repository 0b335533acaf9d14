"""One run: launch, wait for the first token, measure CPU and memory, compare tokens, measure the steady state, stop.

The CPU clocks are read right after the first token, before further requests, so that neither the check of tokens nor
the steady state counts as part of the start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from coldstart.bench import stages
from coldstart.launch.completions import CompletionClient
from coldstart.system.proc import processes
from coldstart.system.timeline import Span, Timeline
from coldstart.validate.answers import Answer, ask_alone
from coldstart.validate.launch import HOST, LaunchedServer, Launcher, serving

HARNESS = "harness"
LISTENING, ANSWERING = "until listening", "first request"
CONCURRENCY = 8
SINGLE_REQUESTS = 3


@dataclass(frozen=True)
class RunSettings:
    """Requests of every run. `ready_timeout_s` is the time from the launch to the first token, in seconds."""

    prompts: Sequence[str]
    max_tokens: int = 64
    ready_timeout_s: float = 900.0
    steady: bool = True


@dataclass(frozen=True)
class Steady:
    """Steady state of a server: seconds per answer alone, seconds to one token, tokens per second with 8 requests."""

    latency_s: float
    one_token_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Run:
    """One measured start; times in seconds from the launch, memory in bytes."""

    mode: str
    round: int
    first_token_s: float
    cpu_s: float
    pss_bytes: int
    phases: Mapping[str, float]
    stages: Mapping[str, float]
    spans: Sequence[Mapping[str, object]]
    answers: Sequence[Answer]
    steady: Steady | None = None
    readiness: Mapping[str, object] = field(default_factory=dict)


def run(launcher: Launcher, directory: Path, settings: RunSettings, index: int) -> Run:
    """Start the launcher's server once and measure it; stop it in every case.

    Raises:
        ServerDiedError: The server died.
        CommandFailedError: It returned no token in time, or did not answer a request.
    """
    before = read_cpu_s()
    with serving(launcher, directory) as server:
        return measure(launcher, server, settings, index, before)


def measure(
    launcher: Launcher,
    server: LaunchedServer,
    settings: RunSettings,
    index: int,
    before: Mapping[psutil.Process, float],
) -> Run:
    """Measure a server that was launched after `read_cpu_s` returned `before`. Raises as `run`, and NoAnswerError."""
    client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
    deadline_s = server.launched_s + settings.ready_timeout_s
    first = client.first_token(settings.prompts[0], deadline_s=deadline_s, check=server.check)
    readiness = server.read_readiness()  # which names a server that is no process of the command
    cpu_s = _measure_cpu_s(server, before)
    pss = processes.pss_bytes([process.pid for process in server.processes()])
    listening = Span(LISTENING, server.launched_s, first.listening_s, HARNESS)
    harness = Timeline([listening, Span(ANSWERING, first.listening_s, first.token_s, HARNESS)])
    reported = _reported(server)
    return Run(
        mode=launcher.mode,
        round=index,
        first_token_s=first.token_s - server.launched_s,
        cpu_s=cpu_s,
        pss_bytes=pss,
        phases=harness.phases() | reported.phases(),
        stages=stages.measure(reported.spans, server.launched_s, first.token_s),
        spans=Timeline([*harness.spans, *reported.spans]).describe_spans(server.launched_s),
        answers=ask_alone(client, settings.prompts, settings.max_tokens),
        steady=sample(client, settings.prompts, settings.max_tokens) if settings.steady else None,
        readiness=readiness,
    )


def _reported(server: LaunchedServer) -> Timeline:
    """Return the spans of the server's processes. Those of a template or a snapshot before this launch are not part of it."""
    if not server.files.events.exists():
        return Timeline()
    spans = Timeline.read(server.files.events).spans
    return Timeline(span for span in spans if span.end_s > server.launched_s)


def sample(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> Steady:
    """Measure a server that has answered before. Raises NoAnswerError."""
    alone = [client.complete(prompts[0], max_tokens).seconds for _ in range(SINGLE_REQUESTS)]
    short = [client.complete(prompts[0], 1).seconds for _ in range(SINGLE_REQUESTS)]
    asked = [prompts[i % len(prompts)] for i in range(2 * CONCURRENCY)]
    return Steady(median(alone), median(short), client.tokens_per_s(asked, max_tokens, CONCURRENCY))


def read_cpu_s(processes: Iterable[psutil.Process] | None = None) -> dict[psutil.Process, float]:
    """Return the CPU seconds of processes (None: of all), and of the children that they have waited for."""
    used = dict[psutil.Process, float]()
    for one in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error):
            used[one] = sum(one.cpu_times()[:4])
    return used


def _measure_cpu_s(server: LaunchedServer, before: Mapping[psutil.Process, float]) -> float:
    """Return the CPU seconds of the processes of a start, and what their parents, such as a template, used since `before`."""
    created = server.processes()
    parents = {
        parent
        for one in created
        if (parent := one.parent()) is not None and parent.pid not in (1, os.getpid())
    }
    used = read_cpu_s({*created, *parents})
    return sum(used.values()) - sum(before.get(one, 0.0) for one in used)
