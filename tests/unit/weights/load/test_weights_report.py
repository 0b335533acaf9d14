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
