"""Parse vLLM's command line into a normal form, without importing vLLM.

``parse(argv)`` returns equal mappings for command lines that vLLM treats as equal: it ignores the order of flags and the
differences between dashes and underscores, ``--name value`` and ``--name=value``, short and long names, dotted names and
JSON, 1k and 1000, or flags and a YAML file of flags. This module does not validate flags, and keeps unknown flags as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

SHORT_FLAGS: Mapping[str, str] = {
    "-q": "quantization",
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-ep": "enable_expert_parallel",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "api_server_count",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-dc": "diffusion_config",
    "-O": "optimization_level",
}
DEFAULT_GPU_MEMORY_SHARE = 0.92
"""vLLM's default of --gpu-memory-utilization: the share of the GPU that a server may use."""
_SYNONYMS = {"device_memory_utilization": "gpu_memory_utilization"}
# vLLM reads these with human suffixes: 1k is 1000, 1K is 1024.
_WITH_SIZE_SUFFIX = frozenset(
    {"max_model_len", "kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_scheduled_tokens"}
)
# vLLM appends each of these to the previous ones.
_REPEATABLE = "middleware"
_SIZE = r"(\d+(?:\.\d+)?)([kmgtKMGT])"
_NUMBER = r"-?\d+(\.\d+)?([eE][+-]?\d+)?"
_LEVEL = r"-O=?(\w+)"


class Arguments(tuple[str, ...]):
    """vLLM arguments as the user typed them after ``--``, with a cached normal form.

    The arguments reach vLLM unchanged. Methods look up a flag by its long name with underscores.
    """

    @cached_property
    def parsed_flags(self) -> Mapping[str, object]:
        """Return the mapping of the arguments, which are parsed on first access."""
        return parse(self)

    def contains_flag(self, name: str) -> bool:
        """Return whether the arguments contain the flag."""
        return name in self.parsed_flags

    def get_value(self, name: str, default: Any = None) -> Any:
        """Return the parsed value of a flag, or ``default`` if the flag is missing."""
        return self.parsed_flags.get(name, default)

    def get_integer(self, name: str, default: int) -> int:
        """Return the flag's value if it is an integer, or else ``default``. vLLM itself rejects other values."""
        value = self.parsed_flags.get(name, default)
        return value if isinstance(value, int) else default

    def gpu_memory_share(self) -> float:
        """Return the value of ``--gpu-memory-utilization``, or vLLM's default if it is missing or not a number."""
        value = self.get_value("gpu_memory_utilization")
        return float(value) if isinstance(value, int | float) else DEFAULT_GPU_MEMORY_SHARE

    def ranks_per_node(self) -> int:
        """Return the number of tensor and pipeline parallel ranks on each node, which is at least 1."""
        ranks = self.get_integer("tensor_parallel_size", 1) * self.get_integer("pipeline_parallel_size", 1)
        return max(1, ranks // max(1, self.get_integer("nnodes", 1)))

    def prepend(self, *words: str) -> Arguments:
        """Return a copy with ``words`` inserted at the start. A flag that is already set keeps its value."""
        return Arguments((*words, *self)) if words else self

    def append(self, *words: str) -> Arguments:
        """Return a copy with ``words`` added at the end. The added words override flags that are already set."""
        return Arguments((*self, *words)) if words else self

    def prepend_model(self, directory: str, *names: str) -> Arguments:
        """Return a copy that starts with ``--model directory``, and serves it as ``names`` unless a served name is set."""
        named = [] if self.contains_flag("served_model_name") else ["--served-model-name", *names]
        return self.prepend("--model", directory, *named)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse ``argv`` (the arguments after ``--``) into {name_with_underscores: value}. The last repetition of a flag wins.

    A value is a scalar, a list if a flag has several values, or a dict for JSON and dotted names.
    """
    plain = _read_config_file(argv)
    is_read = bool(plain)
    dotted: dict[str, object] = {}
    added: list[str] = []
    for flag, words in group_by_flag(argv):
        name, *path = flag.split(".")
        if path:
            _set_nested(dotted, [name, *path], _parse_values(name, words))
        elif name.startswith("no_") and not words:
            plain[name.removeprefix("no_")] = False
        elif name == _REPEATABLE:
            plain[name] = added = [*added, *words]
        else:
            plain[name] = _parse_values(name, words)
    if is_read:
        del plain["config"]
    # vLLM appends dotted names as one JSON argument at the end, so they replace a JSON value completely.
    return {**plain, **dotted}


def _read_config_file(argv: Sequence[str]) -> dict[str, object]:
    """Return the flags in the file of `--config FILE`, or an empty mapping for a file that vLLM rejects, too."""
    path = next((value for flag, value in pairwise(argv) if flag == "--config"), "")
    if not path.endswith((".yaml", ".yml")):
        return {}
    import yaml  # few commands need it

    try:
        settings = [
            (_long_name(f"--{name}"), value)
            for name, value in yaml.safe_load(Path(path).read_bytes()).items()
        ]
    except (OSError, yaml.YAMLError, AttributeError):
        return {}
    return {name: _parse_scalar(name, value) if isinstance(value, str) else value for name, value in settings}


def group_by_flag(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag's name, with underscores, and its values. Values before the first flag belong to "positional"."""
    flag: str | None = None
    words: list[str] = []
    for token in argv:
        if not token.startswith("-") or re.fullmatch(_NUMBER, token):
            words.append(token)
            continue
        if flag is not None or words:
            yield flag or "positional", words
        flag, words = _split(token)
    if flag is not None or words:
        yield flag or "positional", words


def _split(token: str) -> tuple[str, list[str]]:
    if not token.startswith("--") and (level := re.fullmatch(_LEVEL, token)):
        return "optimization_level", [level[1]]
    head, equals, value = token.partition("=")
    return _long_name(head), [value] if equals else []


def _long_name(head: str) -> str:
    first, dot, rest = head.partition(".")
    if first.startswith("--"):
        first = first.removeprefix("--").replace("-", "_")
        return _SYNONYMS.get(first, first) + dot + rest
    return SHORT_FLAGS.get(first, first.removeprefix("-")) + dot + rest


def _parse_values(name: str, words: list[str]) -> object:
    if not words:
        return True
    values = [_parse_scalar(name, word) for word in words]
    return values[0] if len(values) == 1 else values


def _parse_scalar(name: str, word: str) -> object:
    if word[:1] in "{[":
        return _parse_json(word)
    if name in _WITH_SIZE_SUFFIX and (match := re.fullmatch(_SIZE, word)):
        return _parse_size(*match.groups())
    if re.fullmatch(_NUMBER, word):
        return json.loads(word) if not re.match(r"-?0\d", word) else word
    return {"true": True, "false": False, "null": None}.get(word, word)


def _parse_size(number: str, suffix: str) -> int:
    base = 1000 if suffix.islower() else 1024
    return int(float(number) * base ** ("kmgt".index(suffix.lower()) + 1))


def _parse_json(word: str) -> object:
    try:
        parsed: object = json.loads(word)
    except ValueError:
        return word  # vLLM rejects invalid JSON itself
    return parsed


def _set_nested(target: dict[str, object], path: list[str], value: object) -> None:
    *parents, last = path
    for name in parents:
        inner = target.get(name)
        target[name] = inner = inner if isinstance(inner, dict) else {}
        target = inner
    target[last] = value
