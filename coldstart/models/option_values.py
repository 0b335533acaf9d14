"""Check values of vLLM's options before a key is computed: numbers, choices, and words that belong to no option.

The tables list common options only. vLLM's own parser checks all of them at the start. A value that some supported version
of vLLM accepts must pass here, so a number may have any form that one of vLLM's number types accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from coldstart.contract.arguments import group_words
from coldstart.errors import UsageError
from coldstart.system import runtime

NUMBERS = frozenset(
    {
        "api_server_count",
        "block_size",
        "cpu_offload_gb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_start_rank",
        "decode_context_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "long_prefill_token_threshold",
        "master_port",
        "max_cpu_loras",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_num_seqs",
        "nnodes",
        "node_rank",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "port",
        "prefill_context_parallel_size",
        "seed",
        "stream_interval",
        "tensor_parallel_size",
    }
)
FLAGS = frozenset(
    {
        "async_scheduling",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "enable_lora",
        "enable_prefix_caching",
        "enable_sleep_mode",
        "enforce_eager",
        "headless",
        "skip_tokenizer_init",
        "trust_remote_code",
    }
)
# Choices differ between versions of vLLM. These are those of `_CHOICES_OF`; other versions are not checked.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "convert": ("auto", "classify", "embed", "none"),
    "dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
    "logprobs_mode": ("processed_logits", "processed_logprobs", "raw_logits", "raw_logprobs"),
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "runner": ("auto", "draft", "generate", "pooling"),
    "scheduling_policy": ("fcfs", "priority"),
}
_CHOICES_OF = ((0, 32), (0, 33))
# vLLM reads 1k as 1000 and 1K as 1024; "auto", "None" and an empty word select a default.
_SIZE = re.compile(r"\d+(\.\d+)?[kmgt]", re.IGNORECASE)
_DEFAULTS = frozenset({"", "auto", "none"})


def check(given: Sequence[str]) -> None:
    """Raise UsageError for a value that no supported vLLM accepts, a missing value, and a word without an option."""
    choices = _list_choices()
    for name, words in group_words(given):
        option = f"--{name.replace('_', '-')}"
        if name in choices:
            _check_value(option, words, "|".join(choices[name]))
            if words[0] not in choices[name]:
                expected = ", ".join(choices[name])
                raise UsageError(
                    f"vLLM's option {option} does not accept {words[0]!r}.", hint=f"choose one of: {expected}"
                )
        elif name in NUMBERS:
            _check_value(option, words, "NUMBER")
            if not _is_number(words[0]):
                raise UsageError(
                    f"vLLM's option {option} expects a number, found {words[0]!r}.",
                    hint=f"write {option} NUMBER",
                )
        for stray in _list_stray(name, words, choices):
            raise UsageError(
                f"vLLM's arguments contain the word {stray!r}, which belongs to no option.",
                hint="remove it; the model stands before the two dashes",
            )


def _check_value(option: str, words: Sequence[str], expected: str) -> None:
    if not words:
        raise UsageError(f"vLLM's option {option} has no value.", hint=f"write {option} {expected}")


def _is_number(word: str) -> bool:
    if word.strip().lower() in _DEFAULTS or _SIZE.fullmatch(word.strip()):
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True


def _list_stray(name: str, words: Sequence[str], choices: Mapping[str, object]) -> Iterator[str]:
    """Yield the words that vLLM would take for the name of a model. Other options may take several words."""
    if name == "positional":
        yield from words
    elif name.removeprefix("no_") in FLAGS:
        yield from (word for word in words if word.lower() not in ("true", "false"))
    elif name in NUMBERS or name in choices:
        yield from words[1:]


def _list_choices() -> Mapping[str, tuple[str, ...]]:
    distribution = runtime.vllm_distribution()
    is_known = distribution is not None and runtime.within(distribution[1], _CHOICES_OF)
    return CHOICES if is_known else {}
