"""Tensors to load and their order.

Files are in vLLM's natural order of names and tensors in order of their offset. The loader then requests
bytes in the order in which the prefetcher fetches them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from coldstart.models.checkpoint_files import make_natural_key
from coldstart.weights import checkpoint
from coldstart.weights.checkpoint import Tensor

__all__ = ["Tensor", "UnreadableWeightsError", "list_tensors", "select_tensors"]


class UnreadableWeightsError(ValueError):
    """Weights that cannot be loaded tensor by tensor; the message has the reason."""


def list_tensors(plan: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a weights plan in load order.

    Raises:
        UnreadableWeightsError: The plan is invalid, or a file has no tensors (it is not in safetensors format).
    """
    try:
        files = sorted(checkpoint.parse(plan).files, key=lambda file: make_natural_key(file.name))
    except checkpoint.InvalidWeightsPlanError as error:
        raise UnreadableWeightsError(str(error)) from error
    if bare := [file.name for file in files if not file.tensors]:
        raise UnreadableWeightsError(f"{bare[0]} has no safetensors tensors")
    return [replace(tensor, file=file.name) for file in files for tensor in file.tensors]


def select_tensors(tensors: list[Tensor], names: Collection[str]) -> list[Tensor]:
    """Return the tensors with these names, in the order of the plan."""
    wanted = set(names)
    return [tensor for tensor in tensors if tensor.name in wanted]
