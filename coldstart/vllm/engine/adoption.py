"""Whether a worker that was built before may serve a start: by all that it was given, not by a list of what matters.

Opt-out. A worker is told one object, vLLM's configuration; so every leaf of it is compared, and what differs keeps the worker
from being adopted unless APART says why a worker cannot have read it. A flag of a newer vLLM thus counts from its first day.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from coldstart.scheduling.settings import KEY
from coldstart.system import secrets

# Names of leaves, and with a dot at their end of all that lies below one.
_NAMED = "what the server calls itself, or a number drawn for this start"
_ENGINE = "the engine's own, which is built anew in every server"
_OURS = "the settings of our scheduler, which is the engine's"
_KV = "handed over when a worker is adopted"
_MODULES = "the model's own modules, filled in when it is built"
_FOUND = "found by the engine after the worker is there"
APART: Mapping[str, str] = {
    "instance_id": _NAMED,
    "model_config.served_model_name": _NAMED,
    "model_config.served_model_name.": _NAMED,
    "model_config.hf_token": "a credential",
    "scheduler_config.scheduler_cls": _ENGINE,
    "scheduler_config.policy": _ENGINE,
    "scheduler_config.max_num_queued_reqs": _ENGINE,
    "scheduler_config.max_num_queued_tokens": _ENGINE,
    "scheduler_config.max_num_active_seqs": _ENGINE,
    "scheduler_config.long_prefill_token_threshold": _ENGINE,
    "scheduler_config.long_prefill_token_threshold_adaptive": _ENGINE,
    "scheduler_config.prefill_schedule_interval": _ENGINE,
    "scheduler_config.stream_interval": _ENGINE,
    "additional_config": "nothing is in it",
    f"additional_config.{KEY}": _OURS,
    f"additional_config.{KEY}.": _OURS,
    "kv_transfer_config": _KV,
    "kv_transfer_config.": _KV,
    "cache_config.num_gpu_blocks": _FOUND,
    "cache_config.num_cpu_blocks": _FOUND,
    "shutdown_timeout": _ENGINE,
    "structured_outputs_config.": _ENGINE,
    "logging_config.": "what is logged",
    "parallel_config.data_parallel_master_port": _NAMED,
    "parallel_config._data_parallel_master_port_list": _NAMED,
    "parallel_config._data_parallel_master_port_list.": _NAMED,
    "parallel_config._coord_store_port": _NAMED,
    "compilation_config.static_forward_context": _MODULES,
    "compilation_config.static_forward_context.": _MODULES,
    "compilation_config.static_all_moe_layers": _MODULES,
    "compilation_config.static_all_moe_layers.": _MODULES,
    "compilation_config.traced_files": "filled in when it is compiled",
    "compilation_config.compilation_time": "filled in when it is compiled",
    "compilation_config.cache_dir": "where files lie",
    "compilation_config.local_cache_dir": "where files lie",
    "compilation_config.debug_dump_path": "where files lie",
    "compilation_config.enabled_custom_ops": "counted while the model is built",
    "compilation_config.enabled_custom_ops.": "counted while the model is built",
    "compilation_config.disabled_custom_ops": "counted while the model is built",
    "compilation_config.disabled_custom_ops.": "counted while the model is built",
}
# A worker whose buffers are larger than this start needs is one that can serve it: the scheduler keeps to the limit.
ROOMY = frozenset({"scheduler_config.max_num_seqs"})
MODEL = "the model's directory"
_DEEPEST = 12


def facts(config: Any, **more: object) -> dict[str, object]:
    """Every leaf of a configuration by its dotted name, and `more`; what is no text or number is named by its type.

    The model's own directory reads as MODEL, wherever it lies: what it holds is in the bundle's key and the weights' digest.
    """
    place = config.model_config.model
    leaves = ((name, MODEL if leaf == place else leaf) for name, leaf in _leaves(config, "", 0))
    return {name: leaf for name, leaf in leaves if not apart(name)} | more


def apart(name: str) -> str | None:
    """Why a leaf of this name is no matter of the worker's, or None."""
    below = (name[: place + 1] for place, letter in enumerate(name) if letter == ".")
    return APART.get(name) or next((APART[start] for start in below if start in APART), None)


def difference(built: Mapping[str, object], wanted: Mapping[str, object]) -> str | None:
    """The first leaf that differs, with both values; None where the worker may be adopted."""
    for name in sorted({*built, *wanted}):
        had, requested = built.get(name), wanted.get(name)
        if had != requested and not (name in ROOMY and _is_roomier(had, requested)):
            return f"{name}: the built worker has {_shown(name, had)}, this start asks for {_shown(name, requested)}"
    return None


def _is_roomier(had: object, requested: object) -> bool:
    return isinstance(had, int) and isinstance(requested, int) and had >= requested


def _shown(name: str, value: object) -> str:
    return secrets.HIDDEN if secrets.named(name) else secrets.text(str(value))[:200]


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, object]]:
    members = _members(value) if depth < _DEEPEST else None
    if members is None:
        yield name, _leaf(value)
        return
    for key, item in members:
        yield from _leaves(item, f"{name}.{key}" if name else str(key), depth + 1)


def _members(value: Any) -> list[tuple[str, Any]] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _attributes(value)
    if isinstance(value, Mapping):
        return sorted((str(key), item) for key, item in value.items()) if value else None
    if isinstance(value, list | tuple) and value:
        return [(str(index), item) for index, item in enumerate(value)]
    if hasattr(value, "to_dict") and not isinstance(value, type):  # transformers' configurations
        return sorted((str(key), item) for key, item in value.to_dict().items())
    return None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The declared fields, and what vLLM's checks set beside them; not what it fills in privately when it is first asked."""
    declared = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    public = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return sorted((declared | public).items())


def _leaf(value: Any) -> object:
    if value is None or isinstance(value, str | bool | int | float):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value)))
    if isinstance(value, PurePath) or type(value).__module__ == "torch":
        return str(value)
    return getattr(value, "__qualname__", None) or type(value).__qualname__
