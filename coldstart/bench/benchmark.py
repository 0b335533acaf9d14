"""Run one benchmark from request to document: resolve the model, measure, compare.

The model's files are fetched before anything is timed: a download is not part of a cold start.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coldstart.bench import compare, result
from coldstart.bench.measure import RunSettings
from coldstart.bench.run_order import BenchRequest
from coldstart.bench.runner import Bench, BenchRuns, Progress
from coldstart.models import resolution
from coldstart.validate.answers import PROMPTS
from coldstart.validate.launchers import Subject, create_launchers

INCOMPLETE = "the benchmark was cut off before its last run"
"""Failure in a document that `keep` receives."""


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
    about = subject(request)
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
        document = build(bench.measure(request.runs, request.warmup))
    failures, modes = document["failures"], document["modes"]
    for mode in request.names if request.modes else ():
        if "unavailable" in modes[mode] and not any(why.startswith(f"{mode}:") for why in failures):
            failures.append(f"{mode}: requested, but {modes[mode]['unavailable']}")
    if then is not None:
        document["baseline"] = comparison = compare.compare(document, then, request.max_regress_pct)
        failures += compare.regressions(comparison)
    return document


def subject(request: BenchRequest) -> Subject:
    """Return the model in the form that coldstart and vLLM take, with its files fetched.

    Raises UsageError for invalid arguments of vLLM: the first start with them must not follow minutes of other starts.
    """
    model = resolution.resolve(
        request.model, revision=request.revision, offline=request.offline, cache=request.cache
    )
    model = resolution.ensure_weights(model, offline=request.offline)
    cache = ("--cache-dir", str(request.cache.root))
    common = (*cache, "--offline") if request.offline else cache
    target = str(model.path or model.repo_id)
    return Subject(request.model, target, tuple(request.vllm_args), common, request.revision)
