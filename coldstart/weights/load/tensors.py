"""What is to be loaded, as plain data: each tensor's file, place, type and shape, in the order in which it is handed over.

The order is that of the bytes: files by vLLM's natural order of names, tensors by offset, so that what a prefetcher fetches
first is also asked for first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from coldstart.weights import checkpoint
from coldstart.weights.checkpoint import Tensor

__all__ = ["Tensor", "UnreadableWeightsError", "natural", "only", "ordered"]


class UnreadableWeightsError(ValueError):
    """These weights cannot be handed over tensor by tensor; the message says why."""


def ordered(plan: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a weights plan in load order.

    Raises UnreadableWeightsError for files without tensors (not safetensors) and for a name that two files hold.
    """
    try:
        files = sorted(checkpoint.parse(plan).files, key=lambda file: natural(file.name))
    except checkpoint.InvalidWeightsPlanError as error:
        raise UnreadableWeightsError(str(error)) from error
    if bare := [file.name for file in files if not file.tensors]:
        raise UnreadableWeightsError(f"{bare[0]} holds no safetensors")
    return [tensor for file in files for tensor in file.tensors]


def natural(name: str) -> list[str | int]:
    """A sort key by which shard 10 follows shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def only(tensors: list[Tensor], names: Collection[str]) -> list[Tensor]:
    """Those tensors whose name is among `names`, in their order."""
    wanted = set(names)
    return [tensor for tensor in tensors if tensor.name in wanted]
