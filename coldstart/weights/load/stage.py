"""Which tensors of a checkpoint a pipeline rank needs: a pure function of their names, the configuration and the rank.

Invariant: what is left out is exactly what vLLM would drop after reading it. Where the layout of an architecture is not
known here, nothing is left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coldstart.contract import environment

PARTITION_ENV = environment.VLLM_PP_LAYER_PARTITION


@dataclass(frozen=True)
class LayerPatterns:
    """Name patterns of an architecture: the layers (group 1 is the number), and what only an end rank holds."""

    layer: re.Pattern[str]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


_LLAMA = LayerPatterns(
    re.compile(r"model\.layers\.(\d+)\."), ("model.embed_tokens.",), ("model.norm.", "lm_head.")
)
# vLLM keeps OPT's embeddings, projections and final norm on every rank.
_OPT = LayerPatterns(re.compile(r"(?:model\.)?decoder\.layers\.(\d+)\."))
LAYOUTS: Mapping[str, LayerPatterns] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "OPTForCausalLM": _OPT,
}


def layers(count: int, rank: int, size: int, partition: str | None = None) -> range:
    """The layers of pipeline rank `rank` of `size`, as vLLM divides them; `partition` is VLLM_PP_LAYER_PARTITION.

    Layers that do not divide evenly go one each to the ranks before the last, from the back. Raises ValueError for a
    partition that does not fit.
    """
    if partition is not None:
        shares = [int(part) for part in partition.split(",")]
        if len(shares) != size or sum(shares) != count:
            raise ValueError(f"the partition {partition} is not of {count} layers over {size} ranks")
    else:
        shares = [count // size] * size
        for back in range(2, count % size + 2):
            shares[-back] += 1
    start = sum(shares[:rank])
    return range(start, start + shares[rank])


def needed(
    names: Collection[str],
    config: Mapping[str, Any],
    ranks: Sequence[int],
    size: int,
    partition: str | None = None,
) -> list[str]:
    """Those of `names` that the pipeline ranks `ranks` of `size` need, in their given order.

    `config` is the model's config.json. All of them for one rank, and for a layout that is not known. Raises as `layers`.
    """
    layout, count = _layout(config), config.get("num_hidden_layers")
    if size == 1 or layout is None or not isinstance(count, int):
        return list(names)
    # vLLM ties the embeddings exactly when the checkpoint brings no head of its own: the last rank needs them then.
    tied = not any(name.startswith("lm_head.") for name in names)
    own = [(rank, layers(count, rank, size, partition)) for rank in ranks]
    return [name for name in names if any(_holds(layout, name, rank, size, held, tied) for rank, held in own)]


def _layout(config: Mapping[str, Any]) -> LayerPatterns | None:
    (architecture, *others) = config.get("architectures") or [None]
    return None if others else LAYOUTS.get(str(architecture))


def _holds(layout: LayerPatterns, name: str, rank: int, size: int, held: range, tied: bool) -> bool:
    if match := layout.layer.match(name):
        return int(match[1]) in held
    if name.startswith(layout.first):
        return rank == 0 or (tied and rank == size - 1)
    return rank == size - 1 or not name.startswith(layout.last)


def local_ranks(size: int, tensor: int = 1, nodes: int = 1, node: int = 0) -> list[int]:
    """The pipeline ranks that run on node `node` of `nodes`, each of `tensor` processes: vLLM deals ranks out in order."""
    share = size * tensor // nodes
    return sorted({world // tensor for world in range(node * share, (node + 1) * share)})
