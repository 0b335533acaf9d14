"""Cost of the offline phase of three models by the cost model of coldstart.graphs.estimate. Computed, not measured.

`all_pieces` is the cost of recording every piece of a model beside its full graphs, which is why only full graphs are recorded.

Run: python -m benchmarks graphs/offline_cost [--out FILE]
Time: less than a second
Result: offline-cost.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from coldstart.graphs import estimate

# Layers and bf16 bytes on one device from the models' configurations; nodes: the paper counts 12,518 for Llama2-7B's
# 35 graphs, which is 11 a layer and graph.
MODELS = {
    "llama2-7b": estimate.ModelShape(32, 13_476_839_424),
    "qwen3-8b": estimate.ModelShape(36, 16_381_470_720, nodes_a_layer=13),
    "llama3-70b, 8 ranks": estimate.ModelShape(80, 141_107_412_992 // 8, ranks=8),
}
GOAL_S = 900


def row(model: estimate.ModelShape) -> dict[str, object]:
    """Everything that the model says of one model."""
    parts = estimate.seconds(model)
    # One graph for each size and piece: layers + 1 pieces, each prepared, poisoned and proven like a graph.
    pieces = replace(
        model, sizes=model.sizes * (model.layers + 2), nodes_a_layer=model.nodes_a_layer / (model.layers + 2)
    )
    return {
        "model": asdict(model) | {"nodes": model.nodes},
        "seconds": {name: round(value, 1) for name, value in parts.items()},
        "total_s": round(sum(parts.values()), 1),
        "within_15_minutes": sum(parts.values()) < GOAL_S,
        "all_pieces_s": None if model.ranks > 1 else round(sum(estimate.seconds(pieces).values()), 1),
        "bundle_bytes": {name: int(value) for name, value in estimate.disk(model).items()},
        "restore_python_s": round(estimate.restore_seconds(model), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {
        "note": "computed from counts and unit costs; nothing was run on a GPU",
        "unit_costs": asdict(estimate.OfflineCosts()),
        "models": {name: row(model) for name, model in MODELS.items()},
        "command": "python -m benchmarks graphs/offline_cost",
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        json.dumps(
            {
                name: [r["total_s"], r["all_pieces_s"], r["restore_python_s"]]
                for name, r in report["models"].items()
            }
        )
    )  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
