"""Describe the output of a captured callable as data: tensors by their place in the pool, tuples and lists by structure.

Invariant: view(describe(x)) has the structure, shapes, strides and types of x, over the restored pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.tables import SymbolRegion

ENTRY = "vllm"
Like = dict[str, Any]
WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


def describe(output: Any, pool: Sequence[SymbolRegion]) -> Any:
    """Return the output as JSON-compatible data; None if a part of it is not a tensor of the pool."""
    if isinstance(output, tuple | list):
        parts = [describe(part, pool) for part in output]
        return None if None in parts else {type(output).__name__: parts}
    if not hasattr(output, "data_ptr"):
        return None
    address = int(output.data_ptr())
    for region in pool:
        if region.base <= address < region.base + region.size:
            return {
                "symbol": region.symbol, "offset": address - region.base, "shape": list(output.shape),
                "stride": list(output.stride()), "dtype": str(output.dtype).removeprefix("torch."),
            }  # fmt: skip
    return None


def leaves(like: Any) -> Iterator[Like]:
    """Yield the tensors of a description."""
    parts = like.get("tuple", like.get("list")) if isinstance(like, dict) else None
    if parts is None:
        if like is not None:
            yield like
        return
    for part in parts:
        yield from leaves(part)


def spans(output: Any) -> list[tuple[int, int]] | None:
    """Return (address, bytes) of the tensors of a captured output, in order; None if a part is not a tensor."""
    parts = list(_flatten(output))
    if not all(hasattr(part, "data_ptr") for part in parts):
        return None
    layouts = [{"shape": list(t.shape), "stride": list(t.stride()), "dtype": str(t.dtype)[6:]} for t in parts]
    return [(int(t.data_ptr()), size(like)) for t, like in zip(parts, layouts, strict=True)]


def _flatten(output: Any) -> Iterator[Any]:
    """Yield the parts of nested tuples and lists, in the order of `leaves`."""
    if not isinstance(output, tuple | list):
        yield output
        return
    for part in output:
        yield from _flatten(part)


def first(like: Like, rows: int) -> Like:
    """Return the description of the first `rows` rows of a tensor without strides, or of all if it has fewer."""
    return like | {"shape": [min(rows, like["shape"][0]), *like["shape"][1:]]}


def view(like: Any, tensor: Callable[[Like], Any]) -> Any:
    """Rebuild the output; `tensor` creates a tensor from a leaf. Raises GraphRefusedError if it was not described."""
    if like is None:
        raise GraphRefusedError("a part of its output is not a tensor in the memory pool of the graphs")
    for name, kind in (("tuple", tuple), ("list", list)):
        if name in like:
            return kind(view(part, tensor) for part in like[name])
    return tensor(like)


def size(like: Like) -> int:
    """Return the bytes from the first element to the end of the last."""
    stride = like.get("stride") or [math.prod(like["shape"][i + 1 :]) for i in range(len(like["shape"]))]
    last = sum((n - 1) * s for n, s in zip(like["shape"], stride, strict=True))
    return (last + 1) * WIDTHS.get(like["dtype"], 1) if math.prod(like["shape"]) else 0
