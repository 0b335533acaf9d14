"""Writing the committed results into README.md and the texts beside this file, so that no figure is typed by hand.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import architecture_tables  # noqa: E402
import decision_tables  # noqa: E402
import express_tables  # noqa: E402
import figure_tables  # noqa: E402
import fleet_tables  # noqa: E402
import host_tables  # noqa: E402
import model_cache_tables  # noqa: E402
import overhead_tables  # noqa: E402
import scheduling_tables  # noqa: E402
import size_tables  # noqa: E402
import twin_tables  # noqa: E402
from weight_path import report  # noqa: E402

from coldstart.measure.report import markdown  # noqa: E402

README = HERE.parent / "README.md"
RESULTS = HERE / "RESULTS.md"
SCHEDULING = HERE / "SCHEDULING.md"
MODEL_CACHE = HERE / "MODEL_CACHE.md"
COMMANDS = HERE.parent / "docs" / "commands.md"
FLEET = HERE.parent / "docs" / "fleet.md"
HOST = HERE.parent / "docs" / "host.md"


def marked(text: str, name: str, content: str) -> str:
    """`text` with the part marked `name` replaced by `content`. Raises ValueError where there are no marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def readme(text: str) -> str:
    """README with the committed tables."""
    text = marked(text, "cold-start", cold_start()[0])
    return marked(text, "architectures", architecture_tables.sentence())


def commands(text: str) -> str:
    """docs/commands.md with the committed transcript."""
    transcript = json.loads((HERE / "results" / "transcript.json").read_text())
    for name in ("materialize", "inspect", "validate", "serve", "template"):
        entry = transcript[name]
        text = marked(text, name, f"```\n$ {entry['command']}\n{entry['printed'].rstrip()}\n```")
    return text


def results(text: str) -> str:
    """RESULTS.md with the committed reports."""
    text = marked(marked(text, "cold-start", cold_start()[1]), "graphs", graphs())
    text = marked(text, "architectures", architecture_tables.table())
    text = marked(text, "model-sizes", size_tables.table())
    for name in report.TABLES:
        if (result := HERE / "results" / f"{name}.json").exists():
            text = marked(text, name, report.published(name, json.loads(result.read_text())))
    return text


def scheduling(text: str) -> str:
    """SCHEDULING.md with the committed live and simulated results, the calibration, and the overhead."""
    for source in (
        decision_tables,
        scheduling_tables,
        figure_tables,
        overhead_tables,
        twin_tables,
        express_tables,
    ):
        for name, content in source.parts().items():
            text = marked(text, name, content)
    return text


def model_cache(text: str) -> str:
    """MODEL_CACHE.md with the committed results."""
    for name, content in model_cache_tables.parts().items():
        text = marked(text, name, content)
    return text


def fleet(text: str) -> str:
    """docs/fleet.md with the committed results."""
    for name, content in fleet_tables.parts().items():
        text = marked(text, name, content)
    return text


def host(text: str) -> str:
    """docs/host.md with the committed results."""
    for name, content in host_tables.parts().items():
        text = marked(text, name, content)
    return text


def cold_start() -> tuple[str, str]:
    """(the table alone, the whole report) of the committed cold-start result."""
    rendered = markdown.render(json.loads((HERE / "results" / "cold-start-cpu.json").read_text()))
    table = "\n".join(line for line in rendered.splitlines() if line.startswith("|"))
    return table, rendered.strip()


def graphs() -> str:
    """The simulated figures of the CUDA graphs, each with its goal and the commit that it is of."""
    held = json.loads((HERE / "results" / "graphs-simulated.json").read_text())
    models, random, cost, altered = (held[name] for name in ("models", "random", "cost", "altered"))
    rows = models["models"]
    runs = list(held["runs"].values())
    nodes = [row["bytes_per_node"] for row in rows]
    equal, wanted = (sum(row[name] for row in rows) for name in ("equal", "graphs"))
    captured = random["refused"] + random["ambiguous"]
    lines = [
        ("restored outputs bitwise equal", f"{equal} of {wanted}", "all", models),
        (f"the same, {len(runs)} runs at other addresses", _runs(runs), "all", runs[-1]),
        ("bytes a node in tables", f"{min(nodes)} to {max(nodes)}", "small", models),
        ("most contents kept of a model, bytes", max(row["contents_bytes"] for row in rows), "few", models),
        (f"random graphs judged, besides {captured} that are captured", random["judged"], "10000", random),
        ("constants corrupted among them", f"{random['corrupted']} of {random['constants']}", "0", random),
        ("pointers missed among them", f"{random['missed']} of {random['pointers']}", "0", random),
        ("altered bytes refused", f"{altered['refused']} of {altered['bytes']}", "all", altered),
        ("Python's share, us a node", _spread(cost["restore_us_a_node_without_driver"]), "1.5", cost),
        ("relocation of 56,000 pointers, ms", _spread(cost["relocation_ms"]), "2", cost),
        ("tables read and verified, ms", _spread(cost["read_verified_ms"]), "20", cost),
    ]
    rows = [(*line, job.get("commit", held.get("commit"))) for *line, job in lines]
    return "\n".join(scheduling_tables.table(("what", "result", "goal", "commit"), rows))


def _runs(runs: list[dict[str, Any]]) -> str:
    total = {name: sum(run[name] for run in runs) for name in ("graphs", "proven", "equal")}
    captured = total["graphs"] - total["proven"]
    return f"{total['equal']} of {total['graphs']}, {captured} of them not proven and captured"


def _spread(samples: dict[str, float]) -> str:
    return f"{samples['median']:.2f} ({samples['min']:.2f} to {samples['max']:.2f}, {samples['n']} runs)"


def main() -> None:
    """Write the files."""
    README.write_text(readme(README.read_text()))
    COMMANDS.write_text(commands(COMMANDS.read_text()))
    RESULTS.write_text(results(RESULTS.read_text()))
    SCHEDULING.write_text(scheduling(SCHEDULING.read_text()))
    MODEL_CACHE.write_text(model_cache(MODEL_CACHE.read_text()))
    FLEET.write_text(fleet(FLEET.read_text()))
    HOST.write_text(host(HOST.read_text()))


if __name__ == "__main__":
    main()
