"""What recording and proving a model's graphs will take: counts times unit costs, each with its source.

seconds = starts * start + captures + reading + poisoning + proof, where one observed replay is
prepare (KV windows and inputs to the device) + replay + observe (outputs and windows back).
Unit costs are measured where that needs no GPU; the others are published figures of others' machines, named below.
An estimate is printed before hours are spent; it is no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.graphs.inputs import WINDOW

LAYOUTS, PATTERNS, SEEDS, REPLAYS_A_SEED = 2, 2, 2, 3


@dataclass(frozen=True)
class ModelShape:
    """`nodes_a_layer` of one graph; `weight_bytes` on one device; `others` are nodes outside the layers.

    Graphs of several ranks are not recorded, and there may be none to record (`sizes` 0).
    """

    layers: int
    weight_bytes: int
    sizes: int = 51
    nodes_a_layer: float = 11.0
    others: int = 8
    ranks: int = 1

    @property
    def recorded(self) -> bool:
        """Whether there are graphs to record."""
        return self.ranks == 1 and self.sizes > 0

    @property
    def nodes(self) -> int:
        """Nodes of all full graphs."""
        return int(self.sizes * (self.nodes_a_layer * self.layers + self.others))


@dataclass(frozen=True)
class OfflineCosts:
    """Seconds and bytes a second.

    engine: interpreter to ready without weights and capture, warm (vLLM's own start-up figures, H100, 8B: 43.8 s with
    weights and capture); compile: cold minus warm of the same (64.5 - 43.8 s); load: weights from page cache to device;
    bus: pageable copies; capture: a full graph with its warm-up (9 to 15 s for 51, 32B on H100); replay: a decode step;
    read, classify: a node, measured over the simulator; trials: replays a graph and pattern until poison is placed.
    """

    engine: float = 25.0
    compile: float = 20.7
    load: float = 3e9
    bus: float = 6e9
    capture: float = 0.3
    replay: float = 0.02
    read: float = 6e-6
    classify: float = 3e-6
    trials: float = 12.0
    node_bytes: float = 160.0
    cache_bytes: float = 250e6


def seconds(model: ModelShape, costs: OfflineCosts | None = None) -> dict[str, float]:
    """Seconds of each part of the offline phase."""
    c = costs or OfflineCosts()
    start = c.engine + model.weight_bytes / c.load
    parts = {"cold start": start + c.compile, "warm start for the KV size": start, "proof by a start": start}
    if not model.recorded:
        return parts
    observed = 2 * (2 * model.layers * WINDOW) / c.bus + c.replay
    captures = (LAYOUTS + 1) * model.sizes * c.capture
    return parts | {
        "starts for recording": LAYOUTS * start, "start for proving": start, "captures": captures,
        "reading and classifying": model.nodes * (LAYOUTS * c.read + c.classify),
        "poisoning": model.sizes * (1 + PATTERNS * c.trials) * observed,
        "proof": model.sizes * (SEEDS * REPLAYS_A_SEED + 1) * observed,
    }  # fmt: skip


def disk(model: ModelShape, costs: OfflineCosts | None = None) -> dict[str, float]:
    """Bytes in the bundle, without kernels by value."""
    c = costs or OfflineCosts()
    graphs = {"graphs": model.nodes * c.node_bytes} if model.recorded else {}
    return {"compile caches": c.cache_bytes * model.ranks, **graphs}


def restore_seconds(
    model: ModelShape, us_a_node: float = 1.5, read_s_a_byte: float = 4e-9, images: float = 150e6
) -> float:
    """Python's share of a restore: nodes, and every image read, verified and unpacked once."""
    return model.nodes * us_a_node * 1e-6 + images * read_s_a_byte if model.recorded else 0.0
