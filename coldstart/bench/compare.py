"""Compare a benchmark with a saved one, and report a regression only if noise cannot explain it.

change = median(current) / median(baseline) - 1 of the time to the first token, with its 95% confidence interval. The
verdict is `regression` if the lower bound exceeds the threshold, `ok` if the upper bound does not, and `inconclusive`
otherwise, with too few samples, on a different machine, or with a different model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from coldstart.artifacts import canonical
from coldstart.bench import facts
from coldstart.bench.result import SCHEMA_VERSION, Document
from coldstart.bench.stats import MIN_SAMPLES, ratio_interval
from coldstart.errors import UsageError, describe_reason

REGRESSION, OK, INCONCLUSIVE = "regression", "ok", "inconclusive"
CREATE_HINT = "create one: run `coldstart bench MODEL --export json -o FILE`"


def load_baseline(path: Path) -> Document:
    """Read a saved benchmark document. Raises UsageError if it is not a benchmark result or has a different schema version."""
    try:
        document = canonical.read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the baseline {path.name}: {describe_reason(error)}", hint=CREATE_HINT
        ) from error
    if not isinstance(document, dict) or document.get("kind") != "bench":
        raise UsageError(f"the baseline {path.name} is not a result of `coldstart bench`", hint=CREATE_HINT)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"the baseline {path.name} has schema version {document.get('schema_version')}, expected {SCHEMA_VERSION}",
            hint=CREATE_HINT,
        )
    try:
        compare_documents(document, document, 0)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"the baseline {path.name} lacks measurements: {error!r}", hint=CREATE_HINT
        ) from error
    return document


def compare_documents(
    current: Mapping[str, Any], baseline: Mapping[str, Any], max_regress_pct: float
) -> dict[str, object]:
    """Compare every mode that both documents measured, and return the `baseline` field of the new document."""
    differs = (
        "" if facts.is_same_machine(current["machine"], baseline["machine"]) else "on a different machine"
    )
    differs = differs if current["model"] == baseline["model"] else f"with the model {baseline['model']}"
    both = [mode for mode in current["modes"] if _get_samples(current, mode) and _get_samples(baseline, mode)]
    changes = {
        mode: compare_samples(
            _get_samples(current, mode),
            _get_samples(baseline, mode),
            max_regress_pct,
            differs=differs,
        )
        for mode in both
    }
    return {"date": baseline.get("date"), "max_regress_pct": max_regress_pct, "modes": changes}


def compare_samples(
    current: list[float], baseline: list[float], max_regress_pct: float, *, differs: str = ""
) -> Document:
    """Compare two samples of start times in seconds. `differs` says how the baseline was measured, if that forbids a verdict.

    Percentages are changes relative to the baseline. Positive changes mean a slower start.
    """
    result: Document = {
        "verdict": INCONCLUSIVE,
        "change_pct": 100 * (median(current) / median(baseline) - 1),
        "ci95_pct": None,
    }
    if min(len(current), len(baseline)) < MIN_SAMPLES:
        return {**result, "reason": f"fewer than {MIN_SAMPLES} samples"}
    low, high = result["ci95_pct"] = tuple(100 * (bound - 1) for bound in ratio_interval(current, baseline))
    if differs:
        return {**result, "reason": f"measured {differs}"}
    verdict = REGRESSION if low > max_regress_pct else OK if high <= max_regress_pct else INCONCLUSIVE
    return {**result, "verdict": verdict, "reason": None}


def describe_regressions(comparison: Mapping[str, Any]) -> list[str]:
    """Return a message for each mode that regressed."""
    limit = comparison["max_regress_pct"]
    return [
        f"{mode}: {row['change_pct']:.1f} % slower than the baseline "
        f"(at least {row['ci95_pct'][0]:.1f} %, allowed {limit:g} %)"
        for mode, row in comparison["modes"].items()
        if row["verdict"] == REGRESSION
    ]


def _get_samples(document: Mapping[str, Any], mode: str) -> list[float]:
    return [sample["first_token_s"] for sample in document["modes"].get(mode, {}).get("samples", ())]
