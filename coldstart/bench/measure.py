"""One run: launch, wait for the first token, measure CPU and memory, compare tokens, measure the steady state, stop.

The CPU clocks are read right after the first token, before further requests, so that neither the check of tokens nor
the steady state counts as part of the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.bench import stages, usage
from coldstart.bench.steady import Steady, sample
from coldstart.system.proc import processes
from coldstart.system.timeline import Span, Timeline
from coldstart.validate import process_tree
from coldstart.validate.answers import ask_alone
from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST, LaunchedServer, Launcher, serving
from coldstart.validate.tokens import Answer

HARNESS = "harness"
LISTENING, ANSWERING = "until listening", "first request"


@dataclass(frozen=True)
class RunSettings:
    """Requests of every run. `ready_timeout_s` is the time from the launch to the first token, in seconds."""

    prompts: Sequence[str]
    max_tokens: int = 64
    ready_timeout_s: float = 900.0
    steady: bool = True


@dataclass(frozen=True)
class Run:
    """One measured start; times in seconds from the launch, memory in bytes."""

    mode: str
    round: int
    first_token_s: float
    cpu_s: float
    pss_bytes: int
    rss_bytes: int
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
        return _measure(launcher, server, settings, index)


def _measure(launcher: Launcher, server: LaunchedServer, settings: RunSettings, index: int) -> Run:
    client = CompletionClient(HOST, server.files.port, settings.ready_timeout_s)
    deadline_s = server.launched_s + settings.ready_timeout_s
    first = client.first_token(settings.prompts[0], deadline_s=deadline_s, check=server.check)
    after = process_tree.snapshot()
    memory = {process.pid: processes.rss_bytes(process.pid) for process in server.processes()}
    pss = processes.pss_bytes(memory)
    readiness = server.read_readiness()
    listening = Span(LISTENING, server.launched_s, first.listening_s, HARNESS)
    harness = Timeline([listening, Span(ANSWERING, first.listening_s, first.token_s, HARNESS)])
    reported = _reported(server)
    return Run(
        mode=launcher.mode,
        round=index,
        first_token_s=first.token_s - server.launched_s,
        cpu_s=usage.cpu_between(server.before, after, _served(readiness)),
        pss_bytes=pss,
        rss_bytes=max(memory.values(), default=0),
        phases=harness.phases() | reported.phases(),
        stages=stages.measure(reported.spans, server.launched_s, first.token_s),
        spans=Timeline([*harness.spans, *reported.spans]).describe_spans(server.launched_s),
        answers=ask_alone(client, settings.prompts, settings.max_tokens),
        steady=sample(client, settings.prompts, settings.max_tokens) if settings.steady else None,
        readiness=readiness,
    )


def _served(readiness: Mapping[str, object]) -> int | None:
    pid = readiness.get("pid")
    return pid if isinstance(pid, int) else None


def _reported(server: LaunchedServer) -> Timeline:
    """Return the spans of the server's processes. Those of a template or a snapshot before this launch are not part of it."""
    if not server.files.events.exists():
        return Timeline()
    spans = Timeline.read(server.files.events).spans
    return Timeline(span for span in spans if span.end_s > server.launched_s)
