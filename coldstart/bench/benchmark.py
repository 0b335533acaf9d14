"""Run one benchmark: resolve the model, measure its start modes, and compare them with a baseline.

The model's files are downloaded before the first measurement, because a download is not part of a cold start.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from coldstart.bench import compare, result
from coldstart.bench.measure import RunSettings
from coldstart.bench.run_order import BenchOptions
from coldstart.bench.runner import Bench, BenchRuns, Progress
from coldstart.models import resolution
from coldstart.validate.launchers import ModelUnderTest, create_launchers
from coldstart.validate.responses import PROMPTS

INCOMPLETE_FAILURE = "the benchmark was interrupted before its last run"
"""Failure recorded in the partial documents that `save_partial` receives."""


def run(
    request: BenchOptions,
    progress: Progress,
    save_partial: Callable[[result.Document], None] = lambda _: None,
) -> result.Document:
    """Run the benchmark, and return its JSON document. Its `failures` are empty if the benchmark passed.

    After each run, `save_partial` is called with the document of all runs so far.

    Raises:
        UsageError: The baseline is not a benchmark result, or a vLLM argument is invalid.
        NoBundleError: A mode needs a bundle and none exists. Resolving the model may raise other errors.
    """
    # Read the baseline first, so that a wrong file name fails immediately and not after an hour.
    baseline = compare.load_baseline(request.baseline) if request.baseline else None
    subject = prepare_subject(request)
    build_result = partial(
        result.build_document,
        model=request.model,
        vllm_args=request.vllm_args,
        command_line=request.command_line,
    )

    def save_incomplete(measured: BenchRuns) -> None:
        document = build_result(measured)
        document["failures"].append(INCOMPLETE_FAILURE)
        save_partial(document)

    settings = RunSettings(
        PROMPTS, ready_timeout_s=request.ready_timeout_s, measure_steady_state=request.measure_steady_state
    )
    with tempfile.TemporaryDirectory(prefix="coldstart-bench-") as name:
        starters = create_launchers(subject, request.mode_names, Path(name))
        bench = Bench(starters, settings, Path(name), progress, on_run=save_incomplete)
        document = build_result(measured := bench.measure(request.runs, request.warmup))
    failures, modes = document["failures"], document["modes"]
    for mode in request.mode_names if request.modes else ():
        if "unavailable" in modes[mode] and mode not in measured.failed:
            failures.append(f"{mode} was requested but could not run: {modes[mode]['unavailable']}")
    if baseline is not None:
        document["baseline"] = comparison = compare.compare_documents(
            document, baseline, request.max_regress_pct
        )
        failures += compare.describe_regressions(comparison)
    return document


def prepare_subject(request: BenchOptions) -> ModelUnderTest:
    """Resolve the model of a benchmark and download its files.

    Raises the errors of `resolution.resolve` and `resolution.ensure_weights`.
    """
    model = resolution.resolve(
        request.model, revision=request.revision, offline=request.offline, cache=request.cache
    )
    model = resolution.ensure_weights(model, offline=request.offline)
    cache = ("--cache-dir", str(request.cache.root))
    common = (*cache, "--offline") if request.offline else cache
    target = str(model.path or model.repo_id)
    return ModelUnderTest(request.model, target, tuple(request.vllm_args), common, request.revision)
