"""Names for the GPU memory that a vLLM model runner can reach: param:, buffer:, kv:, static:.

A name is a path of attributes and keys, so it is the same in every process that builds the same engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 6
Wanted = Callable[[Any], bool]


def is_on_device(tensor: Any) -> bool:
    """Return whether a tensor is in GPU memory."""
    return bool(tensor.is_cuda)


def name_runner_tensors(runner: Any, wanted: Wanted = is_on_device) -> dict[str, Any]:
    """Return the tensors that `wanted` accepts, by name: weights, buffers, KV caches, then other attributes."""
    # vLLM wraps the model for its CUDA graphs.
    model = runner.model.unwrap() if hasattr(runner.model, "unwrap") else runner.model
    named = {f"param:{name}": p.data for name, p in model.named_parameters()}
    named |= {f"buffer:{name}": b for name, b in model.named_buffers()}
    named |= dict(iterate_kv_caches(runner))
    named |= {f"static:{path}": t for path, t in iterate_static_tensors(runner, wanted)}
    return {symbol: tensor for symbol, tensor in named.items() if wanted(tensor)}


def iterate_kv_caches(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name kv:<layer> and the KV cache of each attention layer. If a layer has several caches, number them."""
    layers: Mapping[str, Any] = runner.compilation_config.static_forward_context
    for name, layer in layers.items():
        cache = getattr(layer, "kv_cache", None)
        parts = cache if isinstance(cache, list | tuple) else [cache]
        for number, part in enumerate(parts):
            if hasattr(part, "untyped_storage"):
                yield f"kv:{name}" + (f".{number}" if len(parts) > 1 else ""), part


def iterate_static_tensors(root: Any, wanted: Wanted) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each wanted tensor in the attributes of vLLM objects below `root`. Visit an object once."""
    seen: set[int] = set()
    queue: list[tuple[str, Any, int]] = [("", root, 0)]
    while queue:
        path, value, depth = queue.pop(0)
        if hasattr(value, "untyped_storage") and hasattr(value, "is_cuda"):
            if wanted(value):
                yield path, value
        elif depth < MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            queue += [
                (f"{path}.{name}" if path else name, child, depth + 1) for name, child in _children(value)
            ]


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), child) for number, child in enumerate(value))
    elif type(value).__module__.startswith("vllm") and not hasattr(value, "named_parameters"):
        yield from getattr(value, "__dict__", {}).items()
        yield from ((s, getattr(value, s)) for s in _slots(value) if hasattr(value, s))


def _slots(value: Any) -> tuple[str, ...]:
    slots = getattr(type(value), "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
