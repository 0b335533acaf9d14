"""Tables of the claims about the start of one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table
from coldstart.bench.report import starts
from coldstart.bench.report.report import markdown_table

Row = Mapping[str, Any]


def report(result: Row) -> str:
    """Return the whole report of `coldstart bench`."""
    return starts.report(result).render("markdown").strip()


def report_table(result: Row) -> str:
    """Return the columns of the report's table that need no explanation."""
    headers, rows = starts.tabulate(result)
    return "\n".join(markdown_table(headers[:7], (row[:7] for row in rows)))


def sizes(result: Row) -> Iterator[Row]:
    """Yield a row for each size and mode that could run."""
    for size, row in result["rows"].items():
        for mode, held in row["modes"].items():
            if "unavailable" not in held:
                yield {"size": size, "mode": mode, "disk": row["disk_bytes"].get(mode), **held}


def weights(row: Row) -> str:
    """Return the median seconds of vLLM's load stage, empty if the mode has none."""
    stage = row["phases"].get("load weights")
    return starts.seconds(stage["median"]) if stage else ""


def size_facts(result: Row) -> str:
    """Return one line for each size: its weights and the time to build its bundle."""
    return "\n".join(
        f"- {size}: {row['parameters'] / 1e6:.1f} million parameters in {row['dtype']}, {row['weights_bytes'] / 2**20:.0f}"
        f" MiB; `materialize` took {sum(row['materialize']['stages'].values()):.0f} s; load average"
        f" {row['machine']['load_1min']:.1f} on {row['machine']['cores']} cores; measured {row['date']}."
        for size, row in result["rows"].items()
    )


def console(page: str, result: str, benchmark: str, command: str) -> Part:
    """Return the part of a page of the tutorial with one command and its output."""

    def text(document: Row) -> str:
        shown = document.get("printed", document)[command]
        return f"```console\n$ {shown['command']}\n{shown['printed'].rstrip()}\n```"

    return Part(f"docs/tutorial/{page}.md", command, result, (text,), benchmark)


def real_tokens(result: Row) -> str:
    """Return the comparison with transformers in one sentence."""
    modes = ", ".join(f"{mode} {'equal' if same else 'different'}" for mode, same in result["equal"].items())
    count = sum(len(row["transformers"]) for row in result["prompts"])
    return f"{len(result['prompts'])} prompts, {count} tokens: {modes}; measured {result['date'][:10]}."


COLD = ("cold-start-cpu", "start/cold_start")
TUTORIALS = {
    ("first-bundle", "transcript", "start/transcript"): "materialize list validate miss",
    ("first-fast-start", "transcript", "start/transcript"): "serve request template serve-template stop",
    ("real-model", "real-model-cpu", "start/real_model"): (
        "write materialize serve chat template serve-template stop"
    ),
}
SIZES = Table(
    sizes,
    {
        "size": "{size}",
        "mode": "{mode}",
        "first token (s)": lambda row: starts.seconds(row["first_token_s"]["median"]),
        "range": lambda row: (
            f"{starts.seconds(row['first_token_s']['min'])} to {starts.seconds(row['first_token_s']['max'])}"
        ),
        "n": "{first_token_s[n]}",
        "weights (s)": weights,
        "CPU (s)": lambda row: starts.seconds(row["cpu_s"]["median"]),
        "PSS (MiB)": lambda row: f"{row['pss_bytes']['median'] / 2**20:.0f}",
        "on disk (MiB)": lambda row: f"{row['disk'] / 2**20:.1f}" if row["disk"] else "",
    },
)
STARTS = Table(
    lambda result: [{"mode": mode, **row} for mode, row in result["modes"].items()],
    {
        "Start": "{mode}",
        "First token (s)": lambda row: starts.seconds(row["first_token_s"]["median"]),
        "Speedup": "{ratio:.1f}x",
    },
)
PARTS = [
    Part("README.md", "cold-start", COLD[0], (report_table,), COLD[1]),
    Part("benchmarks/RESULTS.md", "cold-start", COLD[0], (report,), COLD[1]),
    Part("benchmarks/RESULTS.md", "model-sizes", "model-sizes-cpu", (SIZES, size_facts), "start/model_sizes"),
    Part("docs/index.md", "start-page", COLD[0], (STARTS,), COLD[1]),
    *(
        console(*tutorial, command)
        for tutorial, commands in TUTORIALS.items()
        for command in commands.split()
    ),
    Part("docs/tutorial/real-model.md", "tokens", "real-model-cpu", (real_tokens,), "start/real_model"),
]
