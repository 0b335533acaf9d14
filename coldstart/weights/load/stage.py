"""Tensors of a checkpoint that a pipeline rank needs: a pure function of names, model configuration and rank.

Invariant: the omitted tensors are exactly those that vLLM would read and drop. Nothing is omitted for an architecture
that is not in `LAYOUTS`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerPatterns:
    """Name patterns of an architecture: its layers (group 1 is the number), and the tensors of the first and the last rank."""

    layer: re.Pattern[str]
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


_LLAMA = LayerPatterns(
    re.compile(r"model\.layers\.(\d+)\."), ("model.embed_tokens.",), ("model.norm.", "lm_head.")
)
# vLLM keeps the embeddings and the final norm of these on every rank, and OPT's projections, too.
_LAYERS_ONLY = LayerPatterns(_LLAMA.layer)
_OPT = LayerPatterns(re.compile(r"(?:model\.)?decoder\.layers\.(\d+)\."))
_LIKE_LLAMA = "Llama Mistral Qwen2 Qwen3 Phi3 Granite Glm4 Exaone4 Nemotron Ernie4_5 DeepseekV2 DeepseekV3"
_LIKE_GEMMA = "Gemma Gemma2 Gemma3 Mixtral Qwen2Moe Qwen3Moe GraniteMoe Olmoe StableLm Cohere Cohere2"
LAYOUTS: Mapping[str, LayerPatterns] = {
    **{f"{name}ForCausalLM": _LLAMA for name in _LIKE_LLAMA.split()},
    **{f"{name}ForCausalLM": _LAYERS_ONLY for name in _LIKE_GEMMA.split()},
    "OPTForCausalLM": _OPT,
}


def list_stage_layers(count: int, rank: int, size: int, partition: str | None = None) -> range:
    """Return the layers of pipeline rank `rank` of `size`, divided as in vLLM.

    Remaining layers are assigned to one rank each, backwards from the second-to-last rank.

    Args:
        count: Number of layers of the model.
        rank: Pipeline rank.
        size: Number of pipeline ranks.
        partition: Value of VLLM_PP_LAYER_PARTITION.

    Raises:
        ValueError: The partition does not match the number of layers or ranks.
    """
    if partition is not None:
        shares = [int(part) for part in partition.split(",")]
        if len(shares) != size or sum(shares) != count:
            raise ValueError(f"the partition {partition} does not split {count} layers across {size} ranks")
    else:
        shares = [count // size] * size
        for back in range(2, count % size + 2):
            shares[-back] += 1
    start = sum(shares[:rank])
    return range(start, start + shares[rank])


def select_tensor_names(
    names: Collection[str],
    config: Mapping[str, Any],
    ranks: Sequence[int],
    size: int,
    partition: str | None = None,
) -> list[str]:
    """Return the names of the tensors that the pipeline ranks `ranks` need, in the order of `names`.

    All names are returned for a single rank and for an architecture that is not in `LAYOUTS`.

    Args:
        names: Tensor names of the checkpoint.
        config: Contents of the model's config.json.
        ranks: Pipeline ranks of this node.
        size: Number of pipeline ranks.
        partition: Value of VLLM_PP_LAYER_PARTITION.

    Raises:
        ValueError: The partition does not match the number of layers or ranks.
    """
    layout, count = _layout(config), config.get("num_hidden_layers")
    if size == 1 or layout is None or not isinstance(count, int):
        return list(names)
    # If the checkpoint has no lm_head, vLLM ties the embeddings, so the last rank needs them too.
    tied = not any(name.startswith("lm_head.") for name in names)
    own = [(rank, list_stage_layers(count, rank, size, partition)) for rank in ranks]
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


def list_local_ranks(size: int, tensor: int = 1, nodes: int = 1, node: int = 0) -> list[int]:
    """Return the pipeline ranks that run on node `node` of `nodes`. vLLM assigns ranks to nodes in order.

    Args:
        size: Number of pipeline ranks.
        tensor: Number of processes of each pipeline rank.
        nodes: Number of nodes.
        node: Index of the node.
    """
    share = size * tensor // nodes
    return sorted({world // tensor for world in range(node * share, (node + 1) * share)})
