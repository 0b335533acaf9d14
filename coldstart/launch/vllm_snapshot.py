"""Start mode `snapshot` on a GPU: create and restore vLLM's own snapshot of a bundle's engine.

The bundle digest names the snapshot's directory. vLLM's manifest must match the model, the commit and the arguments. vLLM
itself compares the host, device, driver, versions and variables. A snapshot is restored only from a private directory of
this user and for a trusted bundle. The restored server must reproduce the bundle's canary tokens. Its port accepts
requests before that check, because vLLM decides when it listens. This module has not been tested on a GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical, ownership
from coldstart.artifacts.bundle import Bundle
from coldstart.contract import fallback
from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError, LaunchRefusedError, describe_reason
from coldstart.launch import server
from coldstart.launch.completions import CompletionClient, CompletionFailedError
from coldstart.launch.listening import DEFAULT_HOST, DEFAULT_PORT
from coldstart.launch.planning import ServerStart
from coldstart.launch.server_process import ReadyServer
from coldstart.models.inspection import BundleLookup
from coldstart.system import timeline
from coldstart.system.ipc.peers import await_readable
from coldstart.system.snapshot import runtime_image
from coldstart.vllm import gpu_starts
from coldstart.vllm.gpu_starts import Limit

MANIFEST = "manifest.json"
TIMEOUT = "VLLM_SNAPSHOT_TIMEOUT_S"
RESPONSE_TIMEOUT_S = 120.0
_END_S = 10.0


class RestoredServer:
    """Server that `vllm snapshot restore` started. Its processes (PIDs `tree`) are not children of this process."""

    def __init__(self, tree: Sequence[int]) -> None:
        self.pid, self._asked = tree[0], False
        self._handles = [os.pidfd_open(pid) for pid in tree]

    def fileno(self) -> int:
        """Return the pidfd of the server."""
        return self._handles[0]

    def wait(self) -> int:
        """Wait until the server exits, then kill its other processes. Return 0 if a signal was sent to the server, else 1."""
        await_readable(self)
        for handle in self._handles[1:]:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            await_readable(handle)
        return 0 if self._asked else 1

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self._asked = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handles[0], number)


def find_missing_requirement(start: ServerStart) -> Limit | None:
    """Return the reason why this start cannot restore a snapshot, with a hint, or None if it can."""
    lookup, given = start.request.lookup, start.plan.vllm_args
    model = lookup.model
    if limit := gpu_starts.find_snapshot_limit(given, model.repo_id, model.revision, os.environ):
        return limit
    if lookup.bundle is None or not has_snapshot(lookup, lookup.bundle):
        return "vLLM has no snapshot of this bundle", lookup.format_command("materialize", "--snapshot")
    return None


def has_snapshot(lookup: BundleLookup, bundle: Bundle) -> bool:
    """Return whether vLLM has written a complete snapshot of the bundle's engine."""
    return (_place(lookup, bundle) / MANIFEST).is_file()


def create_snapshot(lookup: BundleLookup, bundle: Bundle) -> None:
    """Start the engine of `bundle`, and write a snapshot of it with `vllm snapshot create`.

    Raises:
        CommandFailedError: vLLM does not support this configuration, or its command failed.
    """
    model = lookup.model
    limit = gpu_starts.find_snapshot_limit(lookup.vllm_args, model.repo_id, model.revision, os.environ)
    if limit is not None:
        raise CommandFailedError(f"cannot create a snapshot: {limit[0]}", hint=limit[1])
    place = _place(lookup, bundle)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # vLLM requires a new directory, and a killed run leaves a directory without a manifest.
    shutil.rmtree(place, ignore_errors=True)
    _run(gpu_starts.build_create_command(place, _engine(lookup)), {})


def restore_server(start: ServerStart) -> ReadyServer:
    """Restore the server with vLLM, and return it if its tokens match the bundle's canary.

    Raises:
        LaunchRefusedError: The snapshot does not fit, vLLM rejects it, or the tokens differ.
        BundleError: The bundle is not trusted.
    """
    lookup, given = start.request.lookup, start.plan.vllm_args
    assert lookup.bundle is not None, "the caller did not check find_missing_requirement()"
    lookup.bundle.require_trust("compile", start.request.trust)
    place = _place(lookup, lookup.bundle)
    again = lookup.format_command("materialize", "--snapshot", "--force")
    if (reason := ownership.ensure_private_directory(place)) is not None:
        raise LaunchRefusedError(
            f"cannot restore the snapshot, because its directory is not private: {reason}", again
        )
    try:
        manifest: Any = canonical.read_json(place / MANIFEST)
        reason = gpu_starts.find_difference(manifest, _engine(lookup), lookup.model.revision or "")
        tree = gpu_starts.read_process_ids(manifest)
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchRefusedError(
            f"cannot read vLLM's snapshot {place}: {describe_reason(error)}", again
        ) from error
    if reason is not None:
        raise LaunchRefusedError(f"the snapshot was created for a different engine: {reason}", again)
    timeout = start.request.ready_timeout
    try:
        _run(
            gpu_starts.build_restore_command(place, *_find_address(given)),
            {} if timeout is None else {TIMEOUT: str(timeout)},
        )
        process = RestoredServer(tree)
    except (CommandFailedError, OSError) as error:
        raise LaunchRefusedError(str(error), again) from error
    try:
        start.request.on_process_start(process.pid)
        return _check(start, process)
    except BaseException:
        server.end(process, _END_S)
        raise


def _check(start: ServerStart, process: RestoredServer) -> ReadyServer:
    """Return the server if its greedy tokens match the canary. Otherwise raise LaunchRefusedError."""
    plan, known = start.plan, start.plan.canary
    tokens: list[int] = []
    if known is not None:
        client = CompletionClient(*_find_address(plan.vllm_args), RESPONSE_TIMEOUT_S)
        try:
            tokens = list(client.complete(known["prompt"], len(known["tokens"])).tokens)
        except CompletionFailedError as error:
            raise LaunchRefusedError(f"the restored server returned no completion: {error}") from error
        if tokens != known["tokens"]:
            raise LaunchRefusedError("the restored server's tokens differ from the bundle's canary")
    report = {
        "fast_path": {"snapshot": True},
        "fallbacks": fallback.encode(plan.fallbacks),
        "tokens": tokens,
        "canary": None if known is None else True,
    }
    return ReadyServer(process, report, timeline.now() - start.began)


def _find_address(given: Arguments) -> tuple[str, int]:
    return str(given.get_value("host") or DEFAULT_HOST), given.get_integer("port", DEFAULT_PORT)


def _place(lookup: BundleLookup, bundle: Bundle) -> Path:
    return runtime_image.choose_engine_image_directory(lookup.cache.runtimes, bundle.digest)


def _engine(lookup: BundleLookup) -> list[str]:
    model = lookup.model
    return gpu_starts.build_engine_arguments(
        model.repo_id or "", model.revision or "", model.name, lookup.vllm_args
    )


def _run(command: Sequence[str], variables: dict[str, str]) -> None:
    """Run a vLLM command until it exits. If it fails, raise CommandFailedError with the last line of its output."""
    done = subprocess.run(
        command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise CommandFailedError(f"vllm {command[3]} {command[4]} failed: {lines[-1]}")
