"""vLLM's model and model loaders without an engine: the work of a worker from configuration to weights.

The time runs from the call of the loader until the last weight is in its parameter. It includes the construction of the
model and excludes vLLM's post-processing. A loader that maps existing memory delays its page faults and copies.
`first_pass_s`, one sum over every parameter, shows the page faults. `usable_s`, the time until post-processing and later
work of the loader have ended, shows all of it. A run that measures `usable_s` does not read parameters, since that would
fault their pages in.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Arguments = Mapping[str, Any]
Ready = Callable[[], None]
ASK = "ready\n"
FASTSAFETENSORS = "fastsafetensors-library"


def import_all() -> None:
    """Import what loading a llama on the CPU needs, plug-ins included."""
    import torch  # noqa: F401
    import vllm.engine.arg_utils
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def load(
    directory: Path,
    arguments: Arguments,
    look: bool = True,
    ready: Ready = lambda: None,
) -> dict[str, Any]:
    """Load the checkpoint with vLLM's `arguments`; seconds by part, CPU seconds, page faults, and the digest if `look`.

    `loaded_at_s` is the moment of the last weight on CLOCK_MONOTONIC. `ready` is called before the clock starts.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    wanted = dict(arguments)
    library = wanted.get("load_format") == FASTSAFETENSORS and wanted.pop("load_format")
    fixed = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 26,
    }
    config = EngineArgs(model=str(directory), **fixed, **wanted).create_engine_config()
    with set_current_vllm_config(config):
        _groups()
        loader = get_model_loader(config.load_config)
        if library:
            loader.get_all_weights = lambda *_: _fastsafetensors(directory)
        ready()
        return _measured(loader, config, look)


def _measured(loader: Any, config: Any, look: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    plain = loader.load_weights

    def load_weights(model: Any, model_config: Any) -> None:
        constructed_s = time.monotonic()
        plain(model, model_config)
        found.update(_marked(began_s, before), construct_s=constructed_s - began_s)
        if look:
            found.update(_looked_at(model))

    loader.load_weights = load_weights
    loader.load_model(vllm_config=config, model_config=config.model_config)
    if not found:
        raise RuntimeError(f"{type(loader).__name__} has not called load_weights")
    if not look:
        end = _marked(began_s, before)
        found |= {"usable_s": end["load_s"], "usable_cpu_s": end["cpu_s"]}
    return found


def _marked(began_s: float, before: resource.struct_rusage) -> dict[str, float]:
    now_s, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    system_s = after.ru_stime - before.ru_stime
    return {
        "load_s": now_s - began_s,
        "loaded_at_s": now_s,
        "cpu_s": after.ru_utime - before.ru_utime + system_s,
        "system_s": system_s,
        "faults": after.ru_minflt - before.ru_minflt + after.ru_majflt - before.ru_majflt,
    }


def _looked_at(model: Any) -> dict[str, Any]:
    import torch
    from blake3 import blake3

    weights = sorted((name, weight.detach()) for name, weight in model.named_parameters())
    began_s = time.monotonic()
    for _, weight in weights:
        weight.view(-1).view(torch.int64).sum()
    found: dict[str, Any] = {"first_pass_s": time.monotonic() - began_s, "threads": torch.get_num_threads()}
    made = blake3()
    for name, weight in weights:
        made.update(name.encode()).update(weight.view(-1).view(torch.uint8).numpy())
    return found | {"digest": made.hexdigest()}


def _groups() -> None:
    """Create vLLM's process groups of one rank."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)  # reads the same file


def _fastsafetensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Load with the library on the CPU, because vLLM's loader for it needs a CUDA device."""
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    from coldstart.models.resolution import weight_files

    files = [str(file) for file in weight_files(directory)]
    loader = ParallelLoader(SingleGroup(), files, device="cpu", nogds=True, use_tqdm_on_load=False)
    try:
        yield from loader.iterate_weights()
    finally:
        loader.close()


def run_in_child(work: Callable[[Ready], dict[str, Any]], ready: Ready = lambda: None) -> dict[str, Any]:
    """Run `work` in a fork of this process and return its result, or {"error": message} if it failed.

    `work` receives a function that runs `ready` in the parent and returns afterwards.
    """
    near, far = socket.socketpair()
    if not (child := os.fork()):
        near.close()
        far.sendall(json.dumps(_tried(work, partial(_ask, far))).encode())
        os._exit(0)
    far.close()
    with near, near.makefile() as answer:
        if (text := answer.readline()) == ASK:
            ready()
            near.sendall(ASK.encode())
            text = answer.read()
    _, status = os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": f"the process ended with status {status}"}


def _ask(parent: socket.socket) -> None:
    parent.sendall(ASK.encode())
    parent.recv(len(ASK))


def _tried(work: Callable[[Ready], dict[str, Any]], ready: Ready) -> dict[str, Any]:
    try:
        return work(ready)
    except BaseException as error:  # noqa: BLE001 -- the parent records any error
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
