"""Tables of the claims about the start of one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table
from coldstart.bench import starts

Row = Mapping[str, Any]


def report(result: Row) -> str:
    """Return the whole report of `coldstart bench`."""
    return starts.build_report(result).render("markdown").strip()


def claim(result: Row) -> str:
    """Return the first sentences of README."""
    first = {mode: row["first_token_s"]["median"] for mode, row in result["modes"].items()}
    ours = [first[mode] for mode in MODES if mode in first and not mode.startswith("vllm")]
    return (
        f"**coldstart starts vLLM from work that was done ahead of time. On {result['machine']['cores']} CPU cores, the first"
        f" token of a small model comes after {starts.format_seconds(min(ours))} to"
        f" {starts.format_seconds(max(ours))} s instead of {starts.format_seconds(first['vllm-warm'])} s. On a GPU, it saves"
        " compilation and memory profiling; how many seconds that is has not been measured yet.**"
    )


def start_modes(result: Row) -> Iterator[Row]:
    """Yield a row for each start mode, with its measured time if it has one."""
    for mode, (what, cpu, gpu, needs) in MODES.items():
        row = result["modes"].get(mode, {})
        found = row.get("first_token_s")
        measured = "cannot run on a CPU"
        if found:
            least, median, most = (starts.format_seconds(found[name]) for name in ("min", "median", "max"))
            measured = f"**{median} s** ({least} to {most})"
        label = f"`{mode}`" if not mode.startswith("vllm") else "plain vLLM"
        yield {"mode": label, "what": what, "cpu": cpu, "gpu": gpu, "needs": needs, "measured": measured}


def memory(result: Row) -> str:
    """Return the memory of the servers in one sentence."""
    held = {mode: row["pss_bytes"]["median"] / 2**20 for mode, row in result["modes"].items()}
    ours = [size for mode, size in held.items() if not mode.startswith("vllm")]
    return (
        f"A server of `{result['model']}` takes {min(ours):.0f} to {max(ours):.0f} MiB (PSS), and one of plain vLLM"
        f" {held['vllm-warm']:.0f} MiB."
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
    return starts.format_seconds(stage["median"]) if stage else ""


def size_facts(result: Row) -> str:
    """Return one line for each size: its weights and the time to build its bundle."""
    return "\n".join(
        f"- {size}: {row['parameters'] / 1e6:.1f} million parameters in {row['dtype']}, {row['weights_bytes'] / 2**20:.0f}"
        f" MiB; `materialize` took {sum(row['materialize']['stages'].values()):.0f} s; load average"
        f" {row['machine']['load_1min']:.1f} on {row['machine']['cores']} cores; measured {row['date']}."
        for size, row in result["rows"].items()
    )


def coldstart_command(page: str, result: str, benchmark: str, *commands: str) -> Part:
    """Return the part of a page with these commands and their output; its mark is the first command."""

    def text(document: Row) -> str:
        printed = document.get("printed", document)
        lines = []
        for name in commands:
            lines += [
                f"$ {printed[name]['command']}",
                *map(cut, printed[name]["printed"].rstrip().splitlines()),
            ]
        return "\n".join(["```console", *lines, "```"])

    return Part(page, commands[0], result, (text,), benchmark)


def cut(line: str) -> str:
    """Return a line of output, cut if it is as long as a response."""
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def real_tokens(result: Row) -> str:
    """Return the comparison with transformers in one sentence."""
    modes = ", ".join(f"{mode} {'equal' if same else 'different'}" for mode, same in result["equal"].items())
    count = sum(len(row["transformers"]) for row in result["prompts"])
    return f"{len(result['prompts'])} prompts, {count} tokens: {modes}; measured {result['date'][:10]}."


LONGEST = 240
"""Longest line of output in characters."""
COLD = ("cold-start-cpu", "start/cold_start")
TUTORIALS = {
    ("docs/tutorial/first-bundle.md", "transcript", "start/transcript"): "materialize list validate miss",
    (
        "docs/tutorial/first-fast-start.md",
        "transcript",
        "start/transcript",
    ): "serve request template serve-template stop",
    ("docs/tutorial/real-model.md", "real-model-cpu", "start/real_model"): (
        "write materialize serve chat template serve-template stop"
    ),
}
# Start modes in the order in which `coldstart serve` tries them: what starts, on a CPU, on a GPU, what it needs.
MODES = {
    "standby": (
        "a sleeping engine wakes up", "no", "yes, predicted", "`coldstart template start MODEL --level asleep-1`",
    ),
    "parked": (
        "a sleeping engine returns to its GPU and wakes up", "no", "yes, predicted",
        "`coldstart template start MODEL --level parked`",
    ),
    "template-engine": (
        "a fork of a process that has built the engine", "yes", "no: CUDA does not survive `fork()`",
        "`coldstart template start MODEL`",
    ),
    "snapshot": (
        "CRIU restores a built engine", "yes", "on request, by `vllm snapshot`, not run",
        "root, CRIU, `coldstart materialize MODEL --snapshot`",
    ),
    "template-runtime": (
        "a fork of a process that has imported torch and vLLM", "yes", "yes, predicted",
        "`coldstart template start MODEL --level runtime`",
    ),
    "runtime-snapshot": (
        "CRIU restores a process with these imports", "yes", "no", "root, CRIU, `coldstart template freeze`",
    ),
    "fresh": ("a new process with the bundle's compiled code", "yes", "yes, predicted", "a bundle"),
    "vllm-warm": ("a new process, vLLM's own caches warm", "yes", "yes, [one start](docs/how-to/gpu.md#what-was-measured)", ""),
    "vllm-cold": ("a new process, empty caches", "yes", "yes, predicted", ""),
}  # fmt: skip
START_MODES = Table(
    start_modes,
    {
        "Mode": "{mode}", "What starts": "{what}", "CPU": "{cpu}", "GPU": "{gpu}", "Needs": "{needs}",
        "First token (two CPU cores)": "{measured}",
    },
)  # fmt: skip
SIZES = Table(
    sizes,
    {
        "size": "{size}",
        "mode": "{mode}",
        "first token (s)": lambda row: starts.format_seconds(row["first_token_s"]["median"]),
        "range": lambda row: (
            f"{starts.format_seconds(row['first_token_s']['min'])} to {starts.format_seconds(row['first_token_s']['max'])}"
        ),
        "n": "{first_token_s[n]}",
        "weights (s)": weights,
        "CPU (s)": lambda row: starts.format_seconds(row["cpu_s"]["median"]),
        "PSS (MiB)": lambda row: f"{row['pss_bytes']['median'] / 2**20:.0f}",
        "on disk (MiB)": lambda row: f"{row['disk'] / 2**20:.1f}" if row["disk"] else "",
    },
)
PARTS = [
    Part("README.md", "claim", COLD[0], (claim,), COLD[1]),
    Part("README.md", "modes", COLD[0], (START_MODES,), COLD[1]),
    Part("README.md", "memory", COLD[0], (memory,), COLD[1]),
    coldstart_command("README.md", "transcript", "start/transcript", "up", "up-request", "down"),
    Part("benchmarks/RESULTS.md", "cold-start", COLD[0], (report,), COLD[1]),
    Part("benchmarks/RESULTS.md", "model-sizes", "model-sizes-cpu", (SIZES, size_facts), "start/model_sizes"),
    *(
        coldstart_command(*tutorial, command)
        for tutorial, commands in TUTORIALS.items()
        for command in commands.split()
    ),
    Part("docs/tutorial/real-model.md", "tokens", "real-model-cpu", (real_tokens,), "start/real_model"),
]
