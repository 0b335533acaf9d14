"""From the samples of the weight benchmarks to their result files and tables. Pure but for `finish`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from coldstart.bench import facts
from coldstart.bench.stats import summarize

RESULTS = Path(__file__).parent / "results"
Sample = Mapping[str, Any]
PARTS = ("load_s", "construct_s", "first_pass_s", "cpu_s", "system_s", "faults")


def peers(samples: Sequence[Sample], limits: Sequence[Mapping[str, float]], size: int) -> dict[str, Any]:
    """The result of `weights_peers`: per loader and cache state the parts' summaries, and the share of the limit."""
    rates = {name: summarize([each[name] for each in limits]) for name in limits[0]}
    floor = floors({name: rate["median"] for name, rate in rates.items()}, size)
    rows: dict[str, Any] = {}
    for name in dict.fromkeys(sample["loader"] for sample in samples):
        own = [sample for sample in samples if sample["loader"] == name]
        rows[name] = refusal(own) or {
            state: _row([s for s in own if s["cache"] == state], floor[state]) for state in floor
        }
    digests = {sample["digest"] for sample in samples if "digest" in sample}
    return {
        "bytes": size,
        "limits_bytes_s": rates,
        "limit_s": floor,
        "digests_identical": len(digests) == 1,
        "loaders": rows,
        "samples": list(samples),
    }


def floors(rates: Mapping[str, float], size: int) -> dict[str, float]:
    """Seconds that a copying loader needs at least, by cache state (`weights_peers`)."""
    disk = max(rates["disk 1"], rates["disk 4"])
    return {"cold": size / disk, "warm": size / rates["touch huge"] + size / rates["memcpy"]}


def refusal(samples: Sequence[Sample]) -> dict[str, str] | None:
    """{"refused": message} when no sample has a time. Raises RuntimeError when only some have one."""
    errors = [sample["error"] for sample in samples if "error" in sample]
    if errors and len(errors) < len(samples):
        raise RuntimeError(f"{samples[0]['loader']} failed in some runs: {errors[0]}")
    return {"refused": errors[0]} if errors else None


def _row(samples: Sequence[Sample], limit_s: float) -> dict[str, Any]:
    parts = {part: summarize([sample[part] for sample in samples]) for part in PARTS}
    return {**parts, "percent_of_limit": 100 * limit_s / parts["load_s"]["median"]}


def peers_table(result: Mapping[str, Any]) -> str:
    """A markdown table, the fastest of the warm ones first, and a line of the limits."""
    lines = [
        "| loader | cold (s) | range | % of limit | warm (s) | range | % of limit | first pass (s) | CPU, warm (s) |",
        "| --- |" + " ---: |" * 8,
    ]
    rows = {name: row for name, row in result["loaders"].items() if "refused" not in row}
    for name, row in sorted(rows.items(), key=lambda item: float(item[1]["warm"]["load_s"]["median"])):
        cells = [cell for state in ("cold", "warm") for cell in _cells(row[state])]
        warm = row["warm"]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {warm['first_pass_s']['median']:.2f} | {warm['cpu_s']['median']:.2f} |"
        )
    rates = ", ".join(f"{name} {rate['median'] / 1e9:.1f}" for name, rate in result["limits_bytes_s"].items())
    refused = [f"- {n}: {row['refused']}" for n, row in result["loaders"].items() if "refused" in row]
    notes = [f"- limits in the same run (GB/s): {rates}", _alike(result), *refused]
    return "\n".join([*lines, "", *notes])


def _cells(row: Mapping[str, Any]) -> list[str]:
    load = row["load_s"]
    return [
        f"{load['median']:.2f}",
        f"{load['min']:.2f} to {load['max']:.2f}",
        f"{row['percent_of_limit']:.0f}",
    ]


def overlap(samples: Sequence[Sample], rates: Mapping[str, float | None], size: int) -> dict[str, Any]:
    """The result of `weights`: per rate, against max and sum of importing and fetching (medians of the same run)."""
    imports = median(sample["seconds"] for sample in samples if sample["way"] == "imports")
    rows = {}
    for name in rates:
        own = [sample for sample in samples if sample.get("rate") == name]
        ways = {w: [s for s in own if s["way"] == w] for w in dict.fromkeys(s["way"] for s in own)}
        fetch = median(sample["fetch_s"] for sample in ways["sequential"])
        bound = max(imports, fetch)
        rows[name] = {
            "bytes_s": rates[name],
            "fetch_s": fetch,
            "max_s": bound,
            "sum_s": imports + fetch,
            "ways": {way: summarize([sample["seconds"] for sample in some]) for way, some in ways.items()},
            "ratio_to_max": {way: median(s["seconds"] for s in some) / bound for way, some in ways.items()},
        }
    alike = len({sample["digest"] for sample in samples if "digest" in sample}) == 1
    return {
        "bytes": size,
        "import_s": imports,
        "digests_identical": alike,
        "rates": rows,
        "samples": list(samples),
    }


def overlap_table(result: Mapping[str, Any]) -> str:
    """A markdown table over the rates."""
    lines = [
        "| rate (MB/s) | fetch (s) | import (s) | way | all weights in (s) | range | over max(import, fetch) | over the sum |",
        "| --- | ---: | ---: | --- |" + " ---: |" * 4,
    ]
    for name, row in result["rates"].items():
        rate = f"{name}: {row['bytes_s'] / 1e6:.0f}" if row["bytes_s"] else name
        for way, taken in row["ways"].items():
            figures = f"{taken['median']:.2f} | {taken['min']:.2f} to {taken['max']:.2f}"
            ratios = f"{row['ratio_to_max'][way]:.2f} | {taken['median'] / row['sum_s']:.2f}"
            lines.append(
                f"| {rate} | {row['fetch_s']:.2f} | {result['import_s']:.2f} | {way} | {figures} | {ratios} |"
            )
    return "\n".join([*lines, "", _alike(result)])


def ranks(samples: Sequence[Sample], size: int) -> dict[str, Any]:
    """The result of `weights_ranks`: bytes read per rank over the bytes of its own parameters."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        own = sample["parameter_bytes"]
        row = {
            "rank": sample["rank"],
            "bytes": sample["bytes"],
            "own_bytes": own,
            "ratio": sample["bytes"] / own,
        }
        rows.setdefault(sample["way"], []).append(row)
    digests = {(sample["rank"], sample["digest"]) for sample in samples}
    alike = len(digests) == len({rank for rank, _ in digests})
    return {"bytes": size, "digests_identical": alike, "ways": rows, "samples": list(samples)}


def ranks_table(result: Mapping[str, Any]) -> str:
    """A markdown table, one line per way and rank."""
    lines = ["| way | rank | read (MB) | own layers (MB) | read / own |", "| --- |" + " ---: |" * 4]
    for way, rows in result["ways"].items():
        lines += [
            f"| {way} | {row['rank']} | {row['bytes'] / 1e6:.1f} | {row['own_bytes'] / 1e6:.1f} | {row['ratio']:.3f} |"
            for row in rows
        ]
    return "\n".join([*lines, "", _alike(result)])


def _alike(result: Mapping[str, Any]) -> str:
    return f"- parameters: {'identical' if result['digests_identical'] else 'DIFFERENT'} for all"


TABLES = {"weights-peers": peers_table, "weights": overlap_table, "weights-ranks": ranks_table}


def published(name: str, result: Mapping[str, Any]) -> str:
    """The table of a result, and what it was measured on."""
    machine, versions = result["machine"], result["versions"]
    on = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, kernel {machine['kernel']}"
    made = ", ".join(f"{package} {version}" for package, version in versions.items())
    command = " ".join(result["command_line"])
    return f"{TABLES[name](result)}\n\nMeasured {result['date']} on {on}; {made}; `{command}`"


def finish(name: str, result: Mapping[str, Any]) -> None:
    """Keep the result, print the table for people and the result without its samples as the last line."""
    made = {
        "schema_version": 1,
        "kind": name,
        "date": facts.today(),
        "command_line": [
            "python",
            f"benchmarks/{Path(sys.argv[0]).name}",
            *facts.without_paths(sys.argv[1:]),
        ],
        "machine": facts.machine(),
        "versions": facts.versions() | _libraries(),
        **result,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    print(published(name, made))
    print(json.dumps({key: value for key, value in made.items() if key != "samples"}, separators=(",", ":")))


def _libraries() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("safetensors", "runai-model-streamer", "fastsafetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
