"""The report of gpu/engine: the state of the rounds that record graphs, and the comparison of plain and restored starts."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coldstart.graphs import gate, live, overview, rounds, table_files

Row = Mapping[str, Any]
PARTS = ("link_s", "link_first_and_canary_s", "canary_s", "rest_s", "wait_for_rest_s", "vllm_capture_s")


def describe_rounds(work: Path) -> dict[str, Any]:
    """Return the state of the directory of the rounds: layouts, bundle, and reasons of refusals."""
    found: dict[str, Any] = {
        "layouts_bytes": {path.name: tree_bytes(path) for path in rounds.layouts(work)},
        "reason": _text(work / rounds.REASON),
        "live": _json(work / live.FILE),
    }
    bundle = work / rounds.BUNDLE
    if bundle.is_dir():
        found |= {
            "rejected": _json(bundle / gate.REJECTED),
            "bundle": _attempt(lambda: describe_bundle(bundle)),
        }
    return found


def describe_bundle(bundle: Path) -> dict[str, Any]:
    """Return the counts of a bundle, with the names of those kernels only that have no binary."""
    found = overview.summary(bundle)
    kernels = found.pop("kernels")
    held = [kernel["held"] for kernel in kernels]
    return found | {
        "kernels": {kind: held.count(kind) for kind in sorted(set(held))},
        "kernels_without_binary": [kernel["name"] for kernel in kernels if kernel["held"] == "name"],
        "words_with_two_readings": len(table_files.load(bundle).assumed),
        "bytes_by_part": {path.name: tree_bytes(path) for path in sorted(bundle.iterdir())},
    }


def tree_bytes(path: Path) -> int:
    """Return the bytes of a file or of all files below a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the report says why a part of it is missing
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _text(path: Path) -> str | None:
    return path.read_text(errors="replace") if path.exists() else None


def _json(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def conclude(steps: Sequence[Row]) -> dict[str, Any]:
    """Return the conclusions of all steps so far; figures whose steps failed are None."""
    return {"steps_failed": [row["label"] for row in steps if not row["ok"]]} | _attempt(
        lambda: _compare(steps)
    )


def _compare(steps: Sequence[Row]) -> dict[str, Any]:
    plain, every = _results(steps, "plain."), _results(steps, "restore.")
    restored = {label: result for label, result in every.items() if _graphs(result)["restored"]}
    first, warm = list(plain.values())[:1], list(plain.values())[1:] or list(plain.values())
    return {
        "capture_s": _pair(warm, restored.values(), "capture_s"),
        "engine_s": _pair(warm, restored.values(), "engine_s"),
        "restore_parts_s": {name: _times(restored.values(), name) for name in PARTS},
        "first_start_s": [result["times"] for result in first],
        "import_s": [row["import_s"] for row in steps if "import_s" in row],
        "graphs": {label: _graphs(result) for label, result in (plain | every).items()},
        "fallbacks": {label: result.get("fallbacks") for label, result in every.items()},
        "answers_equal_first_plain": _answers(first, plain | every),
        "decode_ms": {"plain": _decode(warm), "restore": _decode(restored.values())},
        "offline_s": {
            r["label"]: r.get("seconds") for r in steps if r["label"].startswith(("record", "prove"))
        },
    }


def _results(steps: Sequence[Row], prefix: str) -> dict[str, Row]:
    """Return the results of the steps that started an engine, even if they failed later, by label."""
    found = {row["label"]: row.get("result") or {} for row in steps if row["label"].startswith(prefix)}
    return {label: result for label, result in found.items() if "engine_s" in result.get("times", {})}


def _times(results: Iterable[Row], name: str) -> list[float]:
    return [result["times"][name] for result in results if name in result["times"]]


def _pair(plain: Iterable[Row], restored: Iterable[Row], name: str) -> dict[str, Any]:
    """Return these seconds of all starts, and how many times shorter the restored ones are: medians, range of all pairs."""
    one, other = _times(plain, name), _times(restored, name)
    found: dict[str, Any] = {"plain": one, "restore": other, "times_shorter": None}
    if one and other and min(other) > 0:
        found["times_shorter"] = round(statistics.median(one) / statistics.median(other), 3)
        found["range"] = [round(min(one) / max(other), 3), round(max(one) / min(other), 3)]
    return found


def _graphs(result: Row) -> dict[str, int]:
    counts = result.get("graphs") or {}
    return {kind: len(counts.get(kind, ())) for kind in ("restored", "captured")}


def _answers(first: Sequence[Row], results: Mapping[str, Row]) -> dict[str, Any]:
    """Compare each start's answers with those of the first plain start."""
    known = first[0].get("answers", {}) if first else {}
    return {
        label: {batch: _compare_answers(answer, result.get("answers", {}).get(batch)) for batch, answer in known.items()}
        for label, result in results.items()
    }  # fmt: skip


def _compare_answers(known: Row, given: Row | None) -> dict[str, Any]:
    """Return whether the tokens are equal, and the largest difference of a logprob."""
    if given is None:
        return {"equal": None, "logprobs_apart": None}
    one, other = ([value for row in answer["logprobs"] for value in row] for answer in (known, given))
    apart = max((abs(a - b) for a, b in zip(one, other, strict=False)), default=None)
    return {"equal": given["tokens"] == known["tokens"], "logprobs_apart": apart}


def _decode(results: Iterable[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for result in results:
        for batch, answer in result.get("answers", {}).items():
            found.setdefault(batch, []).append(answer["decode_ms"])
    return found
