"""Run one benchmark from request to document: resolve the model, measure, compare.

The model's files are fetched before anything is timed: a download is not part of a cold start.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coldstart.bench import compare, result, run_order
from coldstart.bench.measure import RunSettings
from coldstart.bench.runner import Bench, BenchRuns, Progress
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.models import options, resolution
from coldstart.scheduling.declaration import list_settings, setting
from coldstart.system.paths import Cache
from coldstart.validate.answers import PROMPTS
from coldstart.validate.launchers import Subject, create_launchers

INCOMPLETE = "the benchmark was cut off before its last run"
"""Failure in a document that `keep` receives."""


@dataclass(frozen=True)
class BenchRequest:
    """Request for a benchmark. A mode that is requested by name must run, or the benchmark fails.

    Raises UsageError if a setting is out of range, or a mode is unknown.
    """

    model: str
    vllm_args: Sequence[str] = ()
    runs: int = setting(5, "Number of measured runs per mode, after the warm-up.", "--runs", least=1)
    warmup: int = setting(1, "Number of warm-up runs per mode, which are not counted.", "--warmup", least=0)
    modes: str | None = setting(
        None, f"Modes to measure, of {', '.join(run_order.MODES)}; default: all.", "--modes", "M,..."
    )
    steady: bool = setting(
        True, "Also measure latency and throughput after the start.", "--steady/--no-steady"
    )
    ready_timeout_s: float = setting(
        900.0, "Abort a start that takes longer, in seconds.", "--ready-timeout", "SECONDS", above=0
    )
    baseline: Path | None = setting(  # noqa: RUF009 - a field
        None, "JSON result of an earlier run to compare with.", "--baseline", "FILE"
    )
    max_regress_pct: float = setting(
        10.0, "Permitted slowdown over --baseline, in percent.", "--max-regress", "PCT"
    )
    revision: str | None = setting(
        None, "Commit, branch or tag of a hub model; default: the newest commit.", "--revision", "REV"
    )
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)

    def __post_init__(self) -> None:
        try:
            for name, one in list_settings(self):
                one.require(name, getattr(self, name))
        except ValueError as error:
            raise UsageError(str(error), hint="coldstart bench --help") from error
        if unknown := [mode for mode in self.names if mode not in run_order.MODES]:
            hint = f"--modes with some of {','.join(run_order.MODES)}"
            raise UsageError(f"unknown mode {unknown[0]!r}", hint=hint)
        if len(set(self.names)) != len(self.names):
            raise UsageError(f"--modes {self.modes}: a mode is repeated", hint="name each mode once")

    @property
    def names(self) -> list[str]:
        """Return the modes to measure."""
        return self.modes.split(",") if self.modes else list(run_order.MODES)

    @property
    def command_line(self) -> list[str]:
        """Return the command that measures the same."""
        line = ["coldstart", "bench", self.model, "--runs", str(self.runs), "--warmup", str(self.warmup)]
        line += ["--modes", self.modes] if self.modes else []
        line += [] if self.steady else ["--no-steady"]
        return [*line, "--", *self.vllm_args] if self.vllm_args else line


def run(
    request: BenchRequest, progress: Progress, keep: Callable[[result.Document], None] = lambda _: None
) -> result.Document:
    """Run the benchmark; return its document, whose `failures` are empty if it passed.

    `keep` receives the incomplete document after each run.

    Raises:
        UsageError: The baseline is not a result, or an argument of vLLM is invalid.
        NoBundleError: A mode finds no bundle. Resolution of the model may raise other errors.
    """
    # Read the baseline first: a wrong file name must not cost an hour.
    then = compare.load(request.baseline) if request.baseline else None
    document = _measure(request, subject(request), progress, keep)
    _judge(document, request, then)
    return document


def subject(request: BenchRequest) -> Subject:
    """Return the model in the form that coldstart and vLLM take, with its files fetched.

    Raises UsageError for invalid arguments of vLLM: the first start with them must not follow minutes of other starts.
    """
    options.check(Arguments(request.vllm_args))
    model = resolution.resolve(
        request.model, revision=request.revision, offline=request.offline, cache=request.cache
    )
    model = resolution.ensure_weights(model, offline=request.offline)
    cache = ("--cache-dir", str(request.cache.root))
    common = (*cache, "--offline") if request.offline else cache
    target = str(model.path or model.repo_id)
    return Subject(request.model, target, tuple(request.vllm_args), common, request.revision)


def _measure(
    request: BenchRequest,
    about: Subject,
    progress: Progress,
    keep: Callable[[result.Document], None],
) -> result.Document:
    build = partial(
        result.document, model=request.model, vllm_args=request.vllm_args, command_line=request.command_line
    )

    def keep_incomplete(measured: BenchRuns) -> None:
        document = build(measured)
        document["failures"].append(INCOMPLETE)
        keep(document)

    settings = RunSettings(PROMPTS, ready_timeout_s=request.ready_timeout_s, steady=request.steady)
    with tempfile.TemporaryDirectory(prefix="coldstart-bench-") as name:
        starters = create_launchers(about, request.names, Path(name))
        bench = Bench(starters, settings, Path(name), progress, keep=keep_incomplete)
        return build(bench.measure(request.runs, request.warmup))


def _judge(document: result.Document, request: BenchRequest, then: result.Document | None) -> None:
    failures, modes = document["failures"], document["modes"]
    for mode in request.names if request.modes else ():
        if "unavailable" in modes[mode] and not any(why.startswith(f"{mode}:") for why in failures):
            failures.append(f"{mode}: requested, but {modes[mode]['unavailable']}")
    if then is not None:
        document["baseline"] = comparison = compare.compare(document, then, request.max_regress_pct)
        failures += compare.regressions(comparison)
