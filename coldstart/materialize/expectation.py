"""What a materialization will take: on a GPU by the cost model of coldstart.graphs.estimate, each stage as it took before."""

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
    """Computed, not measured; the snapshot of a model's weights is not in it."""

    seconds: float
    disk_bytes: float


def expected(requested: Lookup, options: Options) -> Expectation | None:
    """None where it is not known: on the processor, without weights here, or for a configuration that names no layers.

    Counts the largest number of full graphs that vLLM captures unless told otherwise.
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
    """Seconds of each stage, by name, when this model was materialized last; nothing where it was not, or elsewhere."""
    earlier = requested.weights_donor
    fields = [one.field for one in requested.mismatches]
    if earlier is None or any(field.startswith("hardware.") for field in fields):
        return {}
    return dict(earlier.manifest.provenance.seconds)


def of_another(requested: Lookup) -> Mapping[str, str]:
    """What each stage took for the nearest other model on this hardware, as words; nothing where there is none."""
    other = requested.nearest
    if (
        other is None
        or estimates(requested)
        or any(m.field.startswith("hardware.") for m in requested.mismatches)
    ):
        return {}
    took = other.manifest.provenance.seconds
    return {stage: f"{seconds:.0f} s for {other.name}" for stage, seconds in took.items()}


def _ranks(vllm_args: Arguments) -> int:
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return vllm_args.number(names[0], 1) * vllm_args.number(names[1], 1)


def _layers(config: Mapping[str, Any]) -> int | None:
    """Of the text model, where a configuration holds several."""
    nested = config.get("text_config")
    found = (nested if isinstance(nested, Mapping) else config).get("num_hidden_layers")
    return found if isinstance(found, int) and found > 0 else None
