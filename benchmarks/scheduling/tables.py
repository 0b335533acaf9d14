"""Tables of the live scheduling results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.scheduling import overhead_tables, paper_tables
from benchmarks.scheduling.live.names import BASELINE, BOUNDS, CONTROL, HONEST, MLFQ
from benchmarks.tables import Part, Table, listed, span

PAGE = "benchmarks/SCHEDULING.md"
MEAN, LONGEST = "per_token_s.mean", "longest_s.mean"
Row = Mapping[str, Any]


def gains(result: Row) -> Iterator[Row]:
    """Yield each scheduler's ratios over FCFS with the same batch, and the mean over FCFS with the largest batch."""
    for cell in result["cells"]:
        for name in (MLFQ, "mlfq-bounded", CONTROL):
            if against := cell["against"][BASELINE].get(name):
                largest = cell["against"].get(HONEST, {}).get(name)
                yield {**cell, **against, "scheduler": name, "largest": largest}


def ratio(metric: str) -> Callable[[Row], str]:
    """Return a cell with the median ratio and its range."""
    return lambda row: "{median:.2f}x ({min:.2f} to {max:.2f})".format_map(row[metric])


def ratios(
    result: Row, regime: str, base: str, workload: str = "", name: str = MLFQ, metric: str = MEAN
) -> list[float]:
    """Return the median ratios of the cells of a regime."""
    return [
        cell["against"][base][name][metric]["median"]
        for cell in result["cells"]
        if cell["regime"] == regime and workload in ("", cell["workload"])
        if cell["against"].get(base, {}).get(name)
    ]


def decision(result: Row) -> str:
    """Return which scheduler to choose, with the range of the measured ratios."""
    skewed = [
        [span(ratios(result, regime, base, "skewed", name, metric)) for metric in (MEAN, LONGEST)]
        for regime, base, name in (
            ("kv-bound", HONEST, MLFQ),
            ("batch-bound", BASELINE, MLFQ),
            ("batch-bound", BASELINE, "mlfq-bounded"),
        )
    ]
    return (
        "1. **The batch can be as large as memory allows: `fcfs`, without `--batch`.** Skip-join MLFQ reached "
        f"{span(ratios(result, 'neither', BASELINE))} of it, and {span(ratios(result, 'batch-bound', HONEST))} with a smaller"
        " batch.\n2. **Answers have similar lengths (Azure trace): `fcfs`.** With little KV memory skip-join MLFQ reached "
        f"{span(ratios(result, 'kv-bound', HONEST, 'azure'))}.\n3. **KV memory is short, answer lengths differ, and long"
        f" answers may wait: `skip-join-mlfq`.** {skewed[0][0]}; longest tenth {skewed[0][1]}.\n4. **The batch must stay small"
        f" and answer lengths differ: `skip-join-mlfq`.** {skewed[1][0]} (longest tenth {skewed[1][1]}) of `fcfs` with the same"
        f" batch; with `--oldest-share {BOUNDS['mlfq-bounded']}` {skewed[2][0]} ({skewed[2][1]})."
    )


def answers(result: Row) -> str:
    """Return how many repetitions there were, and whether the answers equal those of FCFS."""
    runs = [one["runs"] for cell in result["cells"] for one in cell["schedulers"].values()]
    pairs = [pair for cell in result["cells"] for pair in cell["identical"].values()]
    same, compared = (sum(pair[name] for pair in pairs) for name in ("identical", "compared"))
    return f"Medians of {max(runs)} repetitions (range). Answers identical to those of FCFS: {same} of {compared}."


def capacities(result: Row) -> str:
    """Return the measured rates of load 1."""
    rates: dict[str, list[float]] = {}
    for one in result["capacity"]:
        rates.setdefault(f"{one['regime']} {one['workload']}", []).append(one["requests_per_s"])
    return f"Load 1, requests/s: {listed(f'{place} {median(found):.1f}' for place, found in rates.items())}."


def notes(result: Row) -> str:
    """Return the lines below the table."""
    return "\n".join(f"- {line(result)}" for line in (answers, capacities))


GAINS = Table(
    gains,
    {
        "regime": "{regime}",
        "workload": "{workload}",
        "load": "{load}",
        "scheduler": "{scheduler}",
        "mean per token": ratio(MEAN),
        "mean over fcfs-max": lambda row: ratio(MEAN)(row["largest"]) if row["largest"] else "",
        "TTFT": ratio("ttft_s.mean"),
        "longest 10 %": ratio(LONGEST),
        "throughput": ratio("tokens_per_s"),
        "slowest request": "{slowdown[max]:.1f}x",
    },
)
LIVE, SERVER = "scheduling-live-regimes", "scheduling/live_server"
PARTS = [
    Part(PAGE, "decision", LIVE, (decision,), SERVER),
    Part(PAGE, "live-gain", LIVE, (GAINS, notes), SERVER),
    *paper_tables.PARTS,
    *overhead_tables.PARTS,
]
