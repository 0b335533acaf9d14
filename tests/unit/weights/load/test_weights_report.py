"""Arithmetic of the weight benchmarks: failed loaders, ratios, and complete tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tables import block
from benchmarks.weights import report, tables

GB = 10**9


def sample(loader: str, load_s: float, number: int = 0, state: str = "warm", **more: Any) -> dict[str, Any]:
    parts = dict.fromkeys(report.PARTS, 0.5) | {"load_s": load_s}
    return {"loader": loader, "state": state, "round": number, "digest": "d", **parts, **more}


def test_ours_is_compared_with_the_fastest_peer_of_the_state() -> None:
    rounds = range(3)
    samples = [sample("slow", 4.0, n) for n in rounds] + [sample("fast", 2.0, n) for n in rounds]
    samples += [sample("coldstart", 1.0, n) for n in rounds]
    result = report.peers(samples, 2 * GB)
    rows = result["states"]["warm"]
    loaded = {"peer": "fast", "ratio": 0.5, "ci95": (0.5, 0.5)}
    assert rows["coldstart"]["over_fastest_peer"]["load_s"] == loaded
    assert rows["slow"]["over_fastest_peer"]["load_s"]["ratio"] == 2.0
    table = block(tables.LOADERS, result)
    assert table.index("| coldstart |") < table.index("| fast |") < table.index("| slow |")


def test_delayed_work_of_a_loader_is_compared() -> None:
    samples = [sample("copies", 2.0, n, usable_s=3.0) for n in range(3)]
    samples += [sample("coldstart", 0.1, n, usable_s=6.0) for n in range(3)]
    over = report.peers(samples, GB)["states"]["warm"]["coldstart"]["over_fastest_peer"]
    assert over["load_s"]["ratio"] == pytest.approx(0.05)
    assert over["usable_s"] == {"peer": "copies", "ratio": 2.0, "ci95": (2.0, 2.0)}


def test_failing_loader_is_recorded_and_partial_results_are_dropped() -> None:
    refused = {"loader": "gpu-only", "state": "warm", "round": 0, "error": "no device"}
    result = report.peers([sample("vllm", 1.0), refused], GB)
    assert result["refused"] == {"gpu-only": "no device"}
    assert "- gpu-only: no device" in tables.refused(result)
    with pytest.raises(RuntimeError, match="vllm failed in some runs"):
        report.peers([sample("vllm", 1.0), refused | {"loader": "vllm"}], GB)


def test_other_bytes_are_not_hidden() -> None:
    result = report.peers([sample("vllm", 1.0), sample("coldstart", 1.0, digest="e")], GB)
    assert not result["digests_identical"] and "DIFFERENT" in tables.parameters(result)


def test_overlap_is_over_the_longer_of_import_and_fetch_of_its_round() -> None:
    def round_(number: int, imports: float, fetch: float, ours: float) -> list[dict[str, Any]]:
        limited = {"rate": "half", "bytes_s": 1e8, "round": number}
        took = {"seconds": imports + fetch + 2, "imports_s": imports + fetch, "fetch_s": fetch, "load_s": 1.5}
        return [
            {"way": "imports", "round": number, "seconds": imports},
            {"way": "sequential", **limited, **took},
            {"way": "coldstart", **limited, "seconds": ours},
        ]

    samples = [*round_(0, 6.0, 12.0, 13.2), *round_(1, 12.0, 6.0, 15.6), *round_(2, 6.0, 12.0, 14.4)]
    row = report.overlap(samples, ["half"], GB)["rates"]["half"]
    over = row["over_max"]["coldstart"]
    assert [over["min"], over["median"], over["max"]] == pytest.approx([1.1, 1.2, 1.3])
    assert row["over_sum"]["coldstart"]["median"] == pytest.approx(0.8)
    assert (row["bytes_s"], row["fetch_s"]) == (1e8, 12.0)
    # 0.5 of context, 6 of imports and 1.5 of loading overlap the fetch of 12.
    assert row["predicted_s"] == pytest.approx(12.0)
    assert "| half: 100 | 12.00 | 6.00 | coldstart | 14.40 |" in block(
        tables.OVERLAP, report.overlap(samples, ["half"], GB)
    )
