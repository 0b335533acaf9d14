"""Predict the time and disk space of a materialization.

On a GPU the cost model of coldstart.graphs.estimate is used; each stage's time is that of an earlier materialization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.graphs import estimate
from coldstart.materialize import graphs
from coldstart.materialize.options import Options
from coldstart.models.inspection import Lookup
from coldstart.system import runtime


@dataclass(frozen=True, slots=True)
class Expectation:
    """Computed seconds and bytes on disk, without the snapshot of a model's weights."""

    seconds: float
    disk_bytes: float


def expected(requested: Lookup, options: Options) -> Expectation | None:
    """Predict a materialization. Return None on the CPU, without local weights, or if the configuration has no layer count.

    The prediction assumes the largest number of full graphs that vLLM captures by default.
    """
    layers, files = _layers(requested.model.config), requested.model.weight_files
    if runtime.targets_cpu() or layers is None or not files:
        return None
    ranks = _ranks(requested.vllm_args)
    shape = estimate.ModelShape(layers, sum(file.stat().st_size for file in files) // ranks, ranks=ranks)
    if "graphs" not in options.sections or (ranks == 1 and graphs.absent(requested.vllm_args)):
        shape = estimate.ModelShape(layers, shape.weight_bytes, sizes=0, ranks=ranks)
    return Expectation(sum(estimate.seconds(shape).values()), sum(estimate.disk(shape).values()))


def estimates(requested: Lookup) -> Mapping[str, float]:
    """Return the seconds of each stage in the last materialization of this model on this hardware; empty if there was none."""
    earlier = requested.weights_donor
    fields = [one.field for one in requested.mismatches]
    if earlier is None or any(field.startswith("hardware.") for field in fields):
        return {}
    return dict(earlier.manifest.provenance.seconds)


def describe_nearest(requested: Lookup) -> Mapping[str, str]:
    """Return the time of each stage for the nearest other model on this hardware, as text; none below a second."""
    other = requested.nearest
    if (
        other is None
        or estimates(requested)
        or any(m.field.startswith("hardware.") for m in requested.mismatches)
    ):
        return {}
    took = other.manifest.provenance.seconds
    return {
        stage: f"the nearest bundle, {other.name}, took {seconds:.0f} s"
        for stage, seconds in took.items()
        if seconds >= 1
    }


def _ranks(vllm_args: Arguments) -> int:
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return vllm_args.number(names[0], 1) * vllm_args.number(names[1], 1)


def _layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers, of the text model if the configuration contains several models."""
    nested = config.get("text_config")
    found = (nested if isinstance(nested, Mapping) else config).get("num_hidden_layers")
    return found if isinstance(found, int) and found > 0 else None
