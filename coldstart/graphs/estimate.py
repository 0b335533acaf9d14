"""Estimate the time and disk space to record and prove a model's graphs, from counts and unit costs.

seconds = starts * start + captures + reading + poisoning + proof. One observed replay is prepare (KV windows
and inputs to the device) + replay + observe (outputs and windows from the device).

Unit costs are measured where that needs no GPU. The others are published figures of other machines, named in
`OfflineCosts`. The estimate is shown before a run that takes hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.graphs.inputs import WINDOW

LAYOUTS, PATTERNS, SEEDS, REPLAYS_A_SEED = 2, 2, 2, 3


@dataclass(frozen=True)
class ModelShape:
    """Size of a model: `weight_bytes` on one device, `nodes_a_layer` of one graph, `others` nodes outside the layers.

    Graphs of several ranks are not recorded. `sizes`, the number of graphs, is 0 if there are none.
    """

    layers: int
    weight_bytes: int
    sizes: int = 51
    nodes_a_layer: float = 11.0
    others: int = 8
    ranks: int = 1

    @property
    def recorded(self) -> bool:
        """Return whether graphs are recorded."""
        return self.ranks == 1 and self.sizes > 0

    @property
    def nodes(self) -> int:
        """Return the number of nodes of all full graphs."""
        return int(self.sizes * (self.nodes_a_layer * self.layers + self.others))


@dataclass(frozen=True)
class OfflineCosts:
    """Unit costs in seconds, bytes per second, bytes or counts.

    `engine` is the time from interpreter start to ready, warm, without weights and capture. vLLM publishes
    43.8 s for this start of an 8B model on an H100 with weights and capture. `compile` is the difference to
    its cold start (64.5 s). `load` is the rate from the page cache to the device, and `bus` the rate of
    pageable copies. `capture` is one full graph with its warm-up (9 to 15 s for 51 graphs, 32B on H100).
    `replay` is one decode step. `read` and `classify` are for one node, measured with the simulator. `trials`
    counts the replays for each graph and pattern until the needed contents are found.
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
    """Return the time of each part of the offline phase in seconds."""
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
    """Return the bytes of each part in the bundle, without kernels by value."""
    c = costs or OfflineCosts()
    graphs = {"graphs": model.nodes * c.node_bytes} if model.recorded else {}
    return {"compile caches": c.cache_bytes * model.ranks, **graphs}
