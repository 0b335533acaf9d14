"""Tables of the claims about loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed

OURS = "coldstart"
PAGE = "benchmarks/RESULTS.md"
Row = Mapping[str, Any]


def loaders(result: Row) -> Iterator[Row]:
    """Yield each state's loaders, the fastest first."""
    for state, rows in result["states"].items():
        for name, row in sorted(rows.items(), key=lambda item: float(item[1]["load_s"]["median"])):
            yield {"state": state, "loader": name, **row}


def median(row: Row, part: str) -> str:
    """Return the median of a part, empty if the loader was not measured for it."""
    return f"{row[part]['median']:.2f}" if part in row else ""


def spread(row: Row, part: str) -> str:
    """Return the range of a part."""
    return f"{row[part]['min']:.2f} to {row[part]['max']:.2f}" if part in row else ""


def over_fastest(row: Row, part: str) -> str:
    """Return the ratio to the fastest peer with its interval."""
    over = row.get("over_fastest_peer", {}).get(part)
    if not over or over["ratio"] is None:
        return ""
    return f"{over['ratio']:.2f} ({over['ci95'][0]:.2f} to {over['ci95'][1]:.2f})"


def refused(result: Row) -> str:
    """Return the loaders that could not run, with vLLM's error."""
    return "\n".join(f"- {name}: {message}" for name, message in result["refused"].items())


def overlaps(result: Row) -> Iterator[Row]:
    """Yield the ways of each rate."""
    for name, row in result["rates"].items():
        rate = f"{name}: {row['bytes_s'] / 1e6:.0f}" if row["bytes_s"] else name
        for way, taken in row["ways"].items():
            ratios = {"over_max": row["over_max"][way], "over_sum": row["over_sum"][way]}
            predicted = f"{row['predicted_s']:.2f}" if way == OURS else ""
            fixed = {"rate": rate, "way": way, "fetch_s": row["fetch_s"], "import_s": result["import_s"]}
            yield {**fixed, "time": taken, "predicted": predicted, **ratios}


def parameters(result: Row) -> str:
    """Return whether all loaders made the same parameters."""
    return f"- parameters: {'identical' if result['digests_identical'] else 'DIFFERENT'} for all"


def measured(result: Row) -> str:
    """Return what the result was measured on."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"Measured {result['date']} on {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, kernel {machine['kernel']}; "
        f"{listed(f'{package} {version}' for package, version in versions.items())}"
    )


LOADERS = Table(
    loaders,
    {
        "state": "{state}",
        "loader": "{loader}",
        "weights in parameters (s)": lambda row: median(row, "load_s"),
        "range": lambda row: spread(row, "load_s"),
        "over fastest peer": lambda row: over_fastest(row, "load_s"),
        "first pass (s)": lambda row: median(row, "first_pass_s"),
        "usable (s)": lambda row: median(row, "usable_s"),
        "usable, range": lambda row: spread(row, "usable_s"),
        "usable over fastest peer": lambda row: over_fastest(row, "usable_s"),
        "CPU (s)": lambda row: median(row, "usable_cpu_s"),
    },
)
OVERLAP = Table(
    overlaps,
    {
        "rate (MB/s)": "{rate}",
        "fetch (s)": "{fetch_s:.2f}",
        "import (s)": "{import_s:.2f}",
        "way": "{way}",
        "time (s)": "{time[median]:.2f}",
        "range": "{time[min]:.2f} to {time[max]:.2f}",
        "over max": "{over_max[median]:.2f}",
        "over max, range": "{over_max[min]:.2f} to {over_max[max]:.2f}",
        "over the sum": "{over_sum[median]:.2f}",
        "equation 5 (s)": "{predicted}",
    },
)
HASHED = Table(
    "releases",
    {
        "release": "{release}",
        "hashed (bytes)": "{hashed_bytes[median]:,.0f}",
        "read (bytes)": "{read_bytes[median]:,.0f}",
        "time (s)": "{seconds[median]:.2f}",
        "range": "{seconds[min]:.2f} to {seconds[max]:.2f}",
    },
)
PARTS = [
    Part(PAGE, "weights", "weights", (OVERLAP, parameters, measured)),
    Part(PAGE, "weights-peers", "weights-peers", (LOADERS, refused, parameters, measured), "weights/loaders"),
    Part(PAGE, "weights-hashed", "weights-hashed", (HASHED, measured), "weights/hashed_before_launch"),
]
