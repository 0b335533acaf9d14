"""Summarize the samples of the weight benchmarks. Pure except for `finish`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from coldstart.bench import facts
from coldstart.bench.stats import paired_ratio, summarize

Sample = Mapping[str, Any]
OURS = "coldstart"
PARTS = ("load_s", "construct_s", "first_pass_s", "usable_s", "usable_cpu_s", "system_s", "faults")
# Until the last weight is in its parameter, and until nothing of loading is left to do.
ENDS = ("load_s", "usable_s")


def peers(samples: Sequence[Sample], size: int) -> dict[str, Any]:
    """Return the result of `weights/loaders`: by state and loader the parts' summaries, and the ratio to the fastest
    peer of that state with its 95 % interval (paired by round)."""
    measured, refused = _sorted_out(samples)
    by_state: dict[str, list[Sample]] = {}
    for sample in measured:
        by_state.setdefault(sample["state"], []).append(sample)
    return {
        "bytes": size,
        "digests_identical": len({sample["digest"] for sample in samples if "digest" in sample}) == 1,
        "states": {state: _state(rows) for state, rows in by_state.items()},
        "refused": refused,
        "samples": list(samples),
    }


def _sorted_out(samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, str]]:
    """(samples with a time, what each loader without any says). Raises RuntimeError when one failed only sometimes."""
    refused = {sample["loader"]: str(sample["error"]) for sample in samples if "error" in sample}
    measured = [sample for sample in samples if "error" not in sample]
    for sample in measured:
        if sample["loader"] in refused:
            raise RuntimeError(f"{sample['loader']} failed in some runs: {refused[sample['loader']]}")
    return measured, refused


def _state(samples: Sequence[Sample]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(sample["loader"] for sample in samples):
        own = [sample for sample in samples if sample["loader"] == name]
        rows[name] = {
            part: summarize(known) for part in PARTS if (known := [s[part] for s in own if part in s])
        }
    for end in ENDS:
        _against_fastest(rows, samples, end)
    return rows


def _against_fastest(rows: dict[str, Any], samples: Sequence[Sample], end: str) -> None:
    """Into the rows: the ratio to the fastest peer, both until `end`."""
    theirs = {name: row[end]["median"] for name, row in rows.items() if name != OURS and end in row}
    if not theirs:
        return
    fastest = min(theirs, key=lambda name: theirs[name])
    for name, row in rows.items():
        ratio = paired_ratio(_by_round(samples, name, end), _by_round(samples, fastest, end))
        found = {"peer": fastest, "ratio": ratio and ratio[0], "ci95": ratio and ratio[1]}
        row.setdefault("over_fastest_peer", {})[end] = found


def _by_round(samples: Sequence[Sample], name: str, end: str) -> dict[int, float]:
    return {sample["round"]: sample[end] for sample in samples if sample["loader"] == name and end in sample}


def finish(name: str, result: Mapping[str, Any]) -> None:
    """Store the result and print it without its samples."""
    versions = facts.versions() | _libraries()
    common.finish(name, {"schema_version": 1, "kind": name, **common.about(), "versions": versions, **result})


def _libraries() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("safetensors", "runai-model-streamer", "fastsafetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
