"""One run: launch, wait for the first token, measure CPU and memory, compare tokens, measure the steady state, stop.

The CPU clocks are read right after the first token, before further requests, so that neither the check of tokens nor
the steady state counts as part of the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from coldstart.bench import stages
from coldstart.system.proc import processes
from coldstart.system.timeline import Span, Timeline
from coldstart.validate import process_tree
from coldstart.validate.answers import Answer, ask_alone
from coldstart.validate.completions import CompletionClient
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
    with serving(launcher, directory) as server:
        return measure(launcher, server, settings, index)


def measure(launcher: Launcher, server: LaunchedServer, settings: RunSettings, index: int) -> Run:
    """Measure a server that was just launched. Raises the errors of `run`, and NoAnswerError."""
    client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
    deadline_s = server.launched_s + settings.ready_timeout_s
    first = client.first_token(settings.prompts[0], deadline_s=deadline_s, check=server.check)
    after = process_tree.snapshot()
    pss = processes.pss_bytes([process.pid for process in server.processes()])
    readiness = server.read_readiness()
    listening = Span(LISTENING, server.launched_s, first.listening_s, HARNESS)
    harness = Timeline([listening, Span(ANSWERING, first.listening_s, first.token_s, HARNESS)])
    reported = _reported(server)
    return Run(
        mode=launcher.mode,
        round=index,
        first_token_s=first.token_s - server.launched_s,
        cpu_s=cpu_between(server.before, after, readiness.get("pid")),
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


def cpu_between(before: process_tree.Snapshot, after: process_tree.Snapshot, served: object = None) -> float:
    """Return the CPU seconds of this process's descendants, and of the served process and its parent.

    The time of a process moves to its parent's `reaped_s` when the parent waits for it, so the sum loses nothing. A server
    that a template forked or a snapshot restored is a new process: all of its time counts. This process's own time (the
    client's polling) is excluded; children that it reaped meanwhile count.
    """
    me = os.getpid()
    pids = process_tree.tree(after, [me])
    if (
        isinstance(served, int)
        and served in after
        and served not in pids
        and process_tree.find_earlier(before, after[served]) is None
    ):
        pids |= process_tree.tree(after, [served]) | {after[served].parent}
    spent = after[me].reaped_s - before[me].reaped_s
    for pid in pids - {me, 0, 1}:
        if now := after.get(pid):
            then = process_tree.find_earlier(before, now)
            spent += now.own_s + now.reaped_s - (then.own_s + then.reaped_s if then else 0.0)
    return spent
