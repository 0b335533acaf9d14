"""Engines of real vLLM in one process, one of which has its weights in device memory: each wakes, answers and sleeps.

    python -P tests/support/sleep_cycles.py BASE DIRECTORY CYCLES ENGINES

The models but the first are fine-tunes with the base's shapes, built below DIRECTORY. Host memory can hold all. It prints
one JSON document with the answers and the resources before and after.
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

from coldstart.contract.plan import LaunchPlan
from coldstart.vllm import sleep
from coldstart.vllm.engine.components import WORKER
from coldstart.vllm.sleep import memory

PROMPTS = ["Once upon a time", "The"]


def tune(base: Path, directory: Path, seed: int) -> Path:
    """Build a fine-tune of `base`: the same names and shapes, other weights."""
    tuned = directory / f"tuned-{seed}"
    shutil.copytree(base, tuned)
    for path in tuned.glob("*.safetensors"):
        random = torch.Generator().manual_seed(seed)
        tensors = load_file(path)
        for name, tensor in tensors.items():
            noise = torch.rand(tensor.shape, generator=random).to(tensor.dtype)
            tensors[name] = tensor + noise * tensor.abs().mean()
        save_file(tensors, path, {"format": "pt"})
    return tuned


def engine(model: Path) -> LLM:
    """Start an engine that sleeps with our backend."""
    llm = LLM(
        str(model), max_model_len=128, max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=1 << 24,
        enable_sleep_mode=True, worker_cls=WORKER, worker_extension_cls=sleep.EXTENSION,
        enable_prefix_caching=False,
    )  # fmt: skip
    llm.llm_engine.vllm_config.model_config.sleep_mode_backend = sleep.NAME
    assert llm.collective_rpc("coldstart_bind_weights_to_sleep", args=(model.name,)) == [None]
    return llm


def answer(llm: LLM) -> list[list[int]]:
    """Return the tokens that follow fixed prompts."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params, use_tqdm=False)]


def managed(llm: LLM) -> Any:
    """Return the backend of an engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.sleep_mode_backend


def mapped_bytes(llm: LLM) -> int:
    """Return the size of the weights of an engine that are in device memory."""
    memory_files = managed(llm)._device
    return sum(region.size for region in memory_files.regions() if memory_files.is_mapped(region))


def resources() -> dict[str, int]:
    """Return the descriptors, memory files and resident KiB of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return {
        "descriptors": len(links),
        "memory_files": sum("memfd:coldstart" in link for link in links),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:coldstart"),
        "resident_kib": int(status.partition("VmRSS:")[2].split()[0]),
    }


def main(base: str, directory: str, cycles: str, count: str) -> None:
    """Run the cycles, then give a fine-tune the base's copy."""
    models = [Path(base), *(tune(Path(base), Path(directory), seed) for seed in range(1, int(count)))]
    LaunchPlan([], key="k").install()
    CpuPlatform.is_sleep_mode_available = lambda self: True
    engines: list[LLM] = []
    for model in models:
        engines.append(engine(model))
        one_bytes = mapped_bytes(engines[-1])
        os.environ["COLDSTART_SLEEP_MEMORY_BYTES"] = str(len(models) * one_bytes)
        engines[-1].sleep(1)
    expected: list[list[list[int]]] = []
    differences, before = 0, dict[str, int]()
    for number in range(int(cycles) + len(engines)):
        llm = engines[number % len(engines)]
        llm.wake_up()
        assert sum(map(mapped_bytes, engines)) == one_bytes, (
            "more than one engine has its weights in device memory"
        )
        tokens = answer(llm)
        llm.sleep(1)
        if number < len(engines):
            expected.append(tokens)
            before = resources()
        else:
            differences += tokens != expected[number % len(engines)]
    after = resources()
    reasons = [
        reason for llm in engines for reason in llm.collective_rpc("coldstart_take_sleep_fallbacks")[0]
    ]
    one, other = managed(engines[0]), managed(engines[1])
    one._arena, other._arena = other._arena, one._arena
    engines[1].wake_up()
    refused = {
        "tokens_are_its_own": answer(engines[1]) == expected[1],
        "reasons": engines[1].collective_rpc("coldstart_take_sleep_fallbacks")[0],
    }
    engines[1].sleep(1)
    # The record of an evicted copy remains, with the reason, until its owner has seen it.
    files = memory.ArenaPool.open_shared().directory.glob("*.json")
    records = sum(not json.loads(path.read_text())["reason"] for path in files)
    print(json.dumps({
        "differences": differences, "answers": expected, "before": before, "after": after,
        "fallbacks": reasons, "refused": refused, "records": records,
    }))  # fmt: skip
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
