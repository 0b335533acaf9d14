"""What is to be loaded, as plain data: each tensor's file, place, type and shape, in the order in which it is handed over.

The order is that of the bytes: files by vLLM's natural order of names, tensors by offset, so that what a prefetcher fetches
first is also asked for first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint: `size` bytes at `offset` of `file`; `dtype` as safetensors spells it.

    `digest` (sha256:...) is empty where the plan was read from the file itself.
    """

    name: str
    file: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    digest: str = ""


class Unreadable(ValueError):
    """These weights cannot be handed over tensor by tensor; the message says why."""


def ordered(plan: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a weights plan in load order.

    Raises Unreadable for files without tensors (not safetensors) and for a name that two files hold.
    """
    try:
        files = sorted(plan["files"], key=lambda file: natural(file["name"]))
        found = [_tensor(file["name"], entry) for file in files for entry in file["tensors"]]
    except (KeyError, TypeError) as error:
        raise Unreadable(f"the plan lacks {error}") from error
    if bare := [file["name"] for file in files if not file["tensors"]]:
        raise Unreadable(f"{bare[0]} holds no safetensors")
    if len({tensor.name for tensor in found}) < len(found):
        raise Unreadable("two files hold a tensor of the same name")
    return found


def natural(name: str) -> list[str | int]:
    """A sort key by which shard 10 follows shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def only(tensors: list[Tensor], names: Collection[str]) -> list[Tensor]:
    """Those tensors whose name is among `names`, in their order."""
    wanted = set(names)
    return [tensor for tensor in tensors if tensor.name in wanted]


def _tensor(file: str, entry: Mapping[str, Any]) -> Tensor:
    place = entry["name"], file, entry["offset"], entry["size"]
    return Tensor(*place, entry["dtype"], tuple(entry["shape"]), entry.get("digest", ""))
