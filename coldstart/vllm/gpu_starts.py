"""Limits and command lines of what vLLM itself has for fast starts on a GPU: `vllm snapshot` and `vllm preload`.

`vllm snapshot` writes an image of one engine with CRIU and cuda-checkpoint. `vllm preload` is a daemon that keeps weights on
the device. Here each of their limits is a reason with a hint before anything runs. The tests compare limits and command lines
with vLLM's own checks and parsers. Neither was run on a device by this project.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coldstart.contract.arguments import Arguments

ENTRY_POINT = "vllm.entrypoints.cli.main"
PLUGINS = "CRIU_CUDA_PLUGIN_DIR"
SLEEP = "--enable-sleep-mode"
Limit = tuple[str, str]
"""A reason, and a hint that the user can type."""

_RANKS = ("tensor", "pipeline", "data", "prefill_context")
_FRONTEND = (
    "grpc", "headless", "api_key", "uds", "middleware", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
    "enable_ssl_refresh", "ssl_ciphers",
)  # fmt: skip
_DRAFT = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")


def find_missing_tool(environ: Mapping[str, str], uid: int) -> Limit | None:
    """Return what this machine lacks for `vllm snapshot`, None if nothing is missing. `uid` is the effective user."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "vllm snapshot needs Linux on x86-64", "use the mode template-runtime"
    tools = ["criu", "cuda-checkpoint", "nvidia-smi", *(["sudo"] if uid else [])]
    path = environ.get("PATH")
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        needs = "root, or sudo without a password" if missing == ["sudo"] else f"the program {missing[0]}"
        return f"vllm snapshot needs {needs}", "install it, or use the mode template-runtime"
    if not (Path(environ.get(PLUGINS, "")) / "cuda_plugin.so").is_file() or not environ.get(PLUGINS):
        return f"{PLUGINS} names no directory with CRIU's cuda_plugin.so", f"export {PLUGINS}=/usr/lib/criu"
    return None


def find_snapshot_limit(
    given: Arguments, repository: str | None, revision: str | None, environ: Mapping[str, str]
) -> Limit | None:
    """Return why vLLM makes no snapshot of a server with these arguments, None if it makes one.

    Args:
        given: Arguments of the server, with the address where it listens.
        repository: Repository of the model on the hub, None for a directory.
        revision: Its commit.
        environ: Variables of the server.
    """
    if repository is None or _COMMIT.fullmatch(revision or "") is None:
        return (
            "vllm snapshot needs a model of the hub at a full commit",
            "name a repository, with --revision COMMIT",
        )
    for name in _RANKS:
        if (size := given.value(f"{name}_parallel_size", 1)) != 1:
            option = f"--{name}-parallel-size".replace("_", "-")
            return f"vllm snapshot needs one rank, and {option} is {size}", f"omit {option}"
    for name in _FRONTEND:
        if given.value(name) not in (None, False, ""):
            option = f"--{name}".replace("_", "-")
            return (
                f"vllm snapshot serves plain HTTP on a port without a key, and {option} is given",
                f"omit {option}",
            )
    if given.value("api_server_count") not in (None, 1):
        return "vllm snapshot serves with one process", "omit --api-server-count"
    if environ.get("VLLM_API_KEY"):
        return "vllm snapshot serves without a key, and VLLM_API_KEY is set", "unset VLLM_API_KEY"
    if (mode := given.value("logprobs_mode")) in ("raw_logits", "processed_logits"):
        return (
            f"vllm snapshot checks log probabilities, and --logprobs-mode is {mode}",
            "omit --logprobs-mode",
        )
    if drafts := [name for name in _DRAFT if given.gives(name)]:
        option = f"--{drafts[0]}".replace("_", "-")
        return "vllm snapshot supports no speculative decoding", f"omit {option}"
    return None


def engine_arguments(repository: str, revision: str, name: str, given: Arguments) -> list[str]:
    """Return the arguments of a snapshot's engine; `given` has none for the address, which a restore chooses."""
    named = [] if given.gives("served_model_name") else ["--served-model-name", name]
    sleep = [] if SLEEP in given else [SLEEP]
    return [repository, *named, *given, "--revision", revision, *sleep]


def create_snapshot(directory: Path, engine: Sequence[str]) -> list[str]:
    """Return the command that writes a snapshot of an engine with the arguments `engine` to a new directory."""
    return [
        sys.executable,
        "-m",
        ENTRY_POINT,
        "snapshot",
        "create",
        *engine,
        "--snapshot-dir",
        str(directory),
    ]


def restore_snapshot(directory: Path, host: str, port: int) -> list[str]:
    """Return the command that restores a snapshot, which ends once the restored server has answered one token."""
    words = ("snapshot", "restore", str(directory), "--host", host, "--port", str(port))
    return [sys.executable, "-m", ENTRY_POINT, *words]


def find_difference(manifest: Mapping[str, Any], engine: Sequence[str], revision: str) -> str | None:
    """Return how the snapshot that vLLM's manifest describes differs from an engine with these arguments, None if it fits."""
    wanted = {"model": engine[0], "model_revision": revision, "engine_argv": list(engine)}
    for name, expected in wanted.items():
        if (found := manifest.get(name)) != expected:
            return f"its {name} is {found!r}, expected {expected!r}"
    return None


def read_tree(manifest: Mapping[str, Any]) -> list[int]:
    """Return the PIDs of a restored server, the server's own first. Raises ValueError for other values."""
    tree = manifest.get("process_tree")
    if not isinstance(tree, list) or not tree or not all(type(pid) is int and pid > 1 for pid in tree):
        raise ValueError("the manifest of the snapshot names no processes")
    return tree


def find_preload_limit(given: Arguments, *, on_cpu: bool) -> Limit | None:
    """Return why an engine with these arguments takes no weights from `vllm preload`, None if it can."""
    if on_cpu:
        return (
            "vllm preload keeps weights on a GPU, and this is vLLM's CPU build",
            "omit --weights-from preload",
        )
    if given.gives("load_format"):
        return f"--load-format {given.value('load_format')} is given", "omit --load-format"
    if given.value("enable_sleep_mode"):
        return "an engine that sleeps may not use weights of vllm preload", f"omit {SLEEP}"
    if given.value("enable_eplb"):
        return "vllm preload does not support --enable-eplb", "omit --enable-eplb"
    return None


def preload(model: Path, directory: Path, given: Sequence[str]) -> list[str]:
    """Return the command of the daemon that keeps the weights of a model; its sockets are in `directory`."""
    return ["vllm", "preload", "--model", str(model), "--weight-cache-socket-dir", str(directory), *given]


def load_preloaded(directory: Path) -> list[str]:
    """Return the arguments with which an engine maps the weights of that daemon; without the daemon vLLM reads the files."""
    return [
        "--load-format",
        "ipc_cache",
        "--model-loader-extra-config",
        json.dumps({"socket_dir": str(directory)}),
    ]
