"""Compare a result with a saved one; report a regression only if noise cannot explain it.

change = median(now) / median(then) - 1 of the seconds to the first token, with its 95 % interval. The verdict is
`regression` if the lower bound is above the threshold, `ok` if the upper bound is not, and `inconclusive` otherwise,
with too few samples, or on another machine.
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
from coldstart.errors import UsageError, describe

REGRESSION, OK, INCONCLUSIVE = "regression", "ok", "inconclusive"
HINT = "coldstart bench MODEL --export json -o FILE"


def load(path: Path) -> Document:
    """Load a saved benchmark document. Raises UsageError if the file is not one, or has another schema version."""
    try:
        document = canonical.read(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the baseline {path.name}: {describe(error)}", hint=HINT) from error
    if not isinstance(document, dict) or document.get("kind") != "bench":
        raise UsageError(f"{path.name} is not a result of coldstart bench", hint=HINT)
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"the baseline has schema version {document.get('schema_version')}, expected {SCHEMA_VERSION}",
            hint=HINT,
        )
    return document


def compare(now: Mapping[str, Any], then: Mapping[str, Any], max_regress_pct: float) -> dict[str, object]:
    """Return the verdict for every mode that both documents measured, as the document's `baseline`."""
    alike = facts.same_machine(now["machine"], then["machine"])
    both = [mode for mode in now["modes"] if _samples(now, mode) and _samples(then, mode)]
    changes = {
        mode: change(_samples(now, mode), _samples(then, mode), max_regress_pct, alike=alike) for mode in both
    }
    return {"date": then.get("date"), "max_regress_pct": max_regress_pct, "modes": changes}


def change(now: list[float], then: list[float], max_regress_pct: float, *, alike: bool) -> Document:
    """Compare two samples of seconds. `alike` is True if they come from comparable machines.

    Percentages are changes from the baseline to now; positive is slower.
    """
    found: Document = {
        "verdict": INCONCLUSIVE,
        "change_pct": 100 * (median(now) / median(then) - 1),
        "ci95_pct": None,
    }
    if min(len(now), len(then)) < MIN_SAMPLES:
        return {**found, "reason": f"fewer than {MIN_SAMPLES} samples"}
    low, high = found["ci95_pct"] = tuple(100 * (bound - 1) for bound in ratio_interval(now, then))
    if not alike:
        return {**found, "reason": "measured on a different machine"}
    verdict = REGRESSION if low > max_regress_pct else OK if high <= max_regress_pct else INCONCLUSIVE
    return {**found, "verdict": verdict, "reason": None}


def regressions(comparison: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each mode that regressed."""
    limit = comparison["max_regress_pct"]
    return [
        f"{mode}: {row['change_pct']:.1f} % slower than the baseline "
        f"(at least {row['ci95_pct'][0]:.1f} %, allowed {limit:g} %)"
        for mode, row in comparison["modes"].items()
        if row["verdict"] == REGRESSION
    ]


def _samples(document: Mapping[str, Any], mode: str) -> list[float]:
    return [sample["first_token_s"] for sample in document["modes"].get(mode, {}).get("samples", ())]
