"""Requirements and command lines of vLLM's own fast starts on a GPU: `vllm snapshot` and `vllm preload`.

`vllm snapshot` writes an image of one engine with CRIU and cuda-checkpoint. `vllm preload` is a daemon that keeps weights
in GPU memory. Before vLLM runs, this module reports each unmet requirement as a reason with a hint. Tests compare the
requirements and command lines with vLLM's own checks and parsers. Neither command has been tested on a GPU.
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
"""Reason why a feature cannot be used, followed by a hint."""

_RANKS = ("tensor", "pipeline", "data", "prefill_context")
_FRONTEND = (
    "grpc", "headless", "api_key", "uds", "middleware", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
    "enable_ssl_refresh", "ssl_ciphers",
)  # fmt: skip
_DRAFT = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")


def find_missing_tool(environ: Mapping[str, str], uid: int) -> Limit | None:
    """Return the reason why this machine cannot run `vllm snapshot`, or None. `uid` is the effective user ID."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "vllm snapshot needs Linux on x86-64", "coldstart serve --mode template-runtime"
    tools = ["criu", "cuda-checkpoint", "nvidia-smi", *(["sudo"] if uid else [])]
    path = environ.get("PATH")
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        needs = "root privileges or the program sudo" if missing == ["sudo"] else f"the program {missing[0]}"
        return f"vllm snapshot needs {needs}", "install it, or run `coldstart serve --mode template-runtime`"
    if not (Path(environ.get(PLUGINS, "")) / "cuda_plugin.so").is_file() or not environ.get(PLUGINS):
        return (
            f"{PLUGINS} is not a directory that contains CRIU's cuda_plugin.so",
            f"export {PLUGINS}=/usr/lib/criu",
        )
    return None


def find_snapshot_limit(
    given: Arguments, repository: str | None, revision: str | None, environ: Mapping[str, str]
) -> Limit | None:
    """Return the reason why `vllm snapshot` does not support a server with these arguments, or None.

    Args:
        given: vLLM arguments of the server, including its address.
        repository: Hub repository of the model, or None for a local directory.
        revision: Commit hash of the repository.
        environ: Environment variables of the server.
    """
    if repository is None or _COMMIT.fullmatch(revision or "") is None:
        return (
            "vllm snapshot needs a hub model at a full commit hash",
            "specify a hub repository and --revision COMMIT",
        )
    for name in _RANKS:
        if (size := given.get_value(f"{name}_parallel_size", 1)) != 1:
            option = f"--{name}-parallel-size".replace("_", "-")
            return f"vllm snapshot supports only one rank, but {option} is {size}", f"omit {option}"
    for name in _FRONTEND:
        if given.get_value(name) not in (None, False, ""):
            option = f"--{name}".replace("_", "-")
            return (
                f"vllm snapshot supports only plain HTTP without an API key, but {option} is set",
                f"omit {option}",
            )
    if given.get_value("api_server_count") not in (None, 1):
        return "vllm snapshot supports only one API server process", "omit --api-server-count"
    if environ.get("VLLM_API_KEY"):
        return "vllm snapshot does not support API keys, but VLLM_API_KEY is set", "unset VLLM_API_KEY"
    if (mode := given.get_value("logprobs_mode")) in ("raw_logits", "processed_logits"):
        return (
            f"vllm snapshot checks log probabilities, but --logprobs-mode is {mode}",
            "omit --logprobs-mode",
        )
    if drafts := [name for name in _DRAFT if given.contains_flag(name)]:
        option = f"--{drafts[0]}".replace("_", "-")
        return "vllm snapshot does not support speculative decoding", f"omit {option}"
    return None


def build_engine_arguments(repository: str, revision: str, name: str, given: Arguments) -> list[str]:
    """Return the arguments of a snapshot's engine. `given` must not contain the address, which is set at the restore."""
    named = [] if given.contains_flag("served_model_name") else ["--served-model-name", name]
    sleep = [] if SLEEP in given else [SLEEP]
    return [repository, *named, *given, "--revision", revision, *sleep]


def build_create_command(directory: Path, engine: Sequence[str]) -> list[str]:
    """Return the command that writes a snapshot of an engine with the arguments `engine` to a new directory."""
    arguments = ("snapshot", "create", *engine, "--snapshot-dir", str(directory))
    return [sys.executable, "-m", ENTRY_POINT, *arguments]


def build_restore_command(directory: Path, host: str, port: int) -> list[str]:
    """Return the command that restores a snapshot, which exits once the restored server has generated one token."""
    arguments = ("snapshot", "restore", str(directory), "--host", host, "--port", str(port))
    return [sys.executable, "-m", ENTRY_POINT, *arguments]


def find_difference(manifest: Mapping[str, Any], engine: Sequence[str], revision: str) -> str | None:
    """Return the difference between a snapshot with this vLLM manifest and an engine with these arguments, or None."""
    wanted = {"model": engine[0], "model_revision": revision, "engine_argv": list(engine)}
    for name, expected in wanted.items():
        if (found := manifest.get(name)) != expected:
            return f"the {name} of the snapshot is {found!r}, expected {expected!r}"
    return None


def read_process_ids(manifest: Mapping[str, Any]) -> list[int]:
    """Return the PIDs of a restored server, API server first. Raises ValueError if the manifest has none."""
    tree = manifest.get("process_tree")
    if not isinstance(tree, list) or not tree or not all(type(pid) is int and pid > 1 for pid in tree):
        raise ValueError("the snapshot manifest contains no valid process_tree")
    return tree


def find_preload_limit(given: Arguments, *, on_cpu: bool) -> Limit | None:
    """Return the reason why an engine with these arguments cannot use the weights of `vllm preload`, or None."""
    if on_cpu:
        return (
            "vllm preload needs a GPU, but this is vLLM's CPU build",
            "omit --weights-from preload",
        )
    if given.contains_flag("load_format"):
        reason = f"vllm preload sets --load-format itself, but the arguments set it to {given.get_value('load_format')}"
        return reason, "omit --load-format"
    if given.get_value("enable_sleep_mode"):
        return f"vllm preload does not support {SLEEP}", f"omit {SLEEP}"
    if given.get_value("enable_eplb"):
        return "vllm preload does not support --enable-eplb", "omit --enable-eplb"
    return None


def build_preload_daemon_command(model: Path, directory: Path, given: Sequence[str]) -> list[str]:
    """Return the command of the daemon that keeps a model's weights in GPU memory. Its sockets are in `directory`."""
    return ["vllm", "preload", "--model", str(model), "--weight-cache-socket-dir", str(directory), *given]


def build_preload_arguments(directory: Path) -> list[str]:
    """Return the vLLM arguments that map the daemon's weights. If the daemon is not running, vLLM reads the files."""
    return [
        "--load-format",
        "ipc_cache",
        "--model-loader-extra-config",
        json.dumps({"socket_dir": str(directory)}),
    ]
