"""Build the JSON document of a benchmark from its measurements, and decide whether it failed.

`modes[m]` contains `first_token_s` and `cpu_s` (median, min, max, n), `ratio` (median of vllm-warm divided by that of
this mode), `phases`, `stages` and other fields; a mode that could not run contains only `unavailable`. A ratio above 1 means a
shorter start. Steady-state ratios divide this mode's value by that of vllm-warm: a latency ratio above 1 or a throughput ratio
below 1 means a slower server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coldstart.bench import facts, run_order
from coldstart.bench.measure import MeasuredRun, SteadyState
from coldstart.bench.runner import BenchRuns
from coldstart.bench.stats import Summary, paired_ratio, summarize
from coldstart.system import secrets
from coldstart.validate.launch import explain_slow_path

SCHEMA_VERSION = 1
STEADY_TOLERANCE = 0.03
Document = dict[str, Any]


def build_document(
    measured: BenchRuns, *, model: str, vllm_args: Sequence[str], command_line: Sequence[str]
) -> Document:
    """Return the document of all runs so far. Its `failures` are empty if and only if the benchmark passed."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "bench",
        "date": facts.format_utc_now(),
        "command_line": facts.strip_paths(secrets.redact_arguments(command_line)),
        "model": facts.strip_paths([model])[0],
        "vllm_args": facts.strip_paths(secrets.redact_arguments(vllm_args)),
        "machine": facts.describe_machine(),
        "versions": facts.list_versions(),
        "tokens_identical": are_tokens_identical(measured),
        "modes": {mode: _summarize_mode(mode, measured) for mode in measured.modes},
        "failures": list_failures(measured),
    }


def are_tokens_identical(measured: BenchRuns) -> bool | None:
    """Return whether all runs except those of vllm-eager produced the tokens of vllm-warm, or None without a comparison."""
    verdicts = [
        _has_reference_tokens(mode, measured) for mode in measured.runs if mode != run_order.VLLM_EAGER
    ]
    if len(verdicts) < 2 or None in verdicts:
        return None
    return all(verdicts)


def list_failures(measured: BenchRuns) -> list[str]:
    """Return the reasons why the benchmark failed: a server exited, tokens differ, or a fast path was not used."""
    reasons = [f"{mode}: {measured.unavailable[mode]}" for mode in measured.modes if mode in measured.failed]
    for mode, runs in measured.runs.items():
        # Without compiled code, rounding may select a different token.
        if mode != run_order.VLLM_EAGER and _has_reference_tokens(mode, measured) is False:
            reasons.append(f"{mode}: tokens differ from those of {run_order.REFERENCE}")
        reasons += [
            f"{mode}: the fast path was not used: {reason}" for reason in list_slow_path_reasons(runs)
        ]
    if not measured.runs and not reasons:
        reasons.append("no mode could run")
    return reasons


def list_slow_path_reasons(runs: Iterable[MeasuredRun]) -> list[str]:
    """Return the distinct reasons why coldstart runs did not use their fast path."""
    reasons: dict[str, None] = {}
    for run in runs:
        if run.mode not in run_order.BASELINES:
            reasons.update(dict.fromkeys(map(str, explain_slow_path(run.readiness))))
    return list(reasons)


def _summarize_mode(mode: str, measured: BenchRuns) -> Document:
    runs = measured.runs.get(mode)
    if not runs:
        return {"unavailable": measured.unavailable.get(mode, "not run")}
    reference = measured.runs.get(run_order.REFERENCE, [])
    first_token = summarize([run.first_token_s for run in runs])
    ratio = paired_ratio(*({run.round: run.first_token_s for run in of} for of in (reference, runs)))
    return {
        "first_token_s": first_token,
        "cpu_s": summarize([run.cpu_s for run in runs]),
        "ratio": ratio[0] if ratio else None,
        "ratio_ci95": ratio[1] if ratio else None,
        "phases": _summarize_by_name([run.phases for run in runs]),
        "stages": _summarize_by_name([run.stages for run in runs]),
        "pss_bytes": summarize([run.pss_bytes for run in runs]),
        "tokens_identical": _has_reference_tokens(mode, measured),
        "steady": _summarize_steady(measured.steady(mode), measured.steady(run_order.REFERENCE)),
        "fast_path": runs[-1].readiness.get("fast_path"),
        "fallbacks": list_slow_path_reasons(runs),
        "samples": [
            {"round": run.round, "first_token_s": run.first_token_s, "cpu_s": run.cpu_s} for run in runs
        ],
        "timeline": min(runs, key=lambda run: abs(run.first_token_s - first_token["median"])).spans,
    }


def _summarize_by_name(runs: Sequence[Mapping[str, float]]) -> dict[str, Summary]:
    """Summarize the seconds of each phase or stage over the runs that have it, in order of appearance."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: summarize([run[name] for run in runs if name in run]) for name in names}


def _has_reference_tokens(mode: str, measured: BenchRuns) -> bool | None:
    reference = measured.runs.get(run_order.REFERENCE)
    if not reference:
        return None
    expected = list(reference[0].responses)
    return all(list(run.responses) == expected for run in measured.runs[mode])


def _summarize_steady(
    own: Mapping[int, SteadyState], reference: Mapping[int, SteadyState]
) -> Document | None:
    if not own:
        return None
    return {
        "latency_s": summarize([one.latency_s for one in own.values()]),
        "tokens_per_s": summarize([one.tokens_per_s for one in own.values()]),
        "latency_ratio": _compare_steady(own, reference, "latency_s", worse=1),
        "throughput_ratio": _compare_steady(own, reference, "tokens_per_s", worse=-1),
    }


def _compare_steady(
    own: Mapping[int, SteadyState], reference: Mapping[int, SteadyState], name: str, *, worse: int
) -> Document | None:
    """Compare a steady-state metric with that of vllm-warm. `worse` is 1 if higher is worse, and -1 if lower is worse."""
    found = paired_ratio(
        *({number: getattr(one, name) for number, one in of.items()} for of in (own, reference))
    )
    if found is None:
        return None
    ratio, interval = found
    losses = sorted(worse * (bound - 1) for bound in interval)
    verdict = "slower" if losses[0] > STEADY_TOLERANCE else "inconclusive"
    return {
        "ratio": ratio,
        "ci95": interval,
        "verdict": "ok" if losses[1] <= STEADY_TOLERANCE else verdict,
        "tolerance": STEADY_TOLERANCE,
    }
