"""Short names for the models of MEDUSA (Table 1) and their common successors, by Hugging Face repository."""

from collections.abc import Mapping

TINY: tuple[str, ...] = ("tiny-llama", "tiny-qwen2", "tiny-opt")
"""Models that `tiny` builds; completion lists them without importing it."""

ALIASES: Mapping[str, str] = {
    # MEDUSA, Table 1
    "falcon-7b": "tiiuae/falcon-7b",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "qwen1.5-0.5b": "Qwen/Qwen1.5-0.5B",
    "qwen1.5-1.8b": "Qwen/Qwen1.5-1.8B",
    "qwen1.5-4b": "Qwen/Qwen1.5-4B",
    "qwen1.5-7b": "Qwen/Qwen1.5-7B",
    "qwen1.5-14b": "Qwen/Qwen1.5-14B",
    "yi-6b": "01-ai/Yi-6B",
    "yi-9b": "01-ai/Yi-9B",
    # common successors, and the OPT family that the serving papers measure
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-2.7b": "facebook/opt-2.7b",
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
}

NAMES: tuple[str, ...] = (*TINY, *ALIASES)
