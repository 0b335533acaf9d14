"""The mode `snapshot` on a GPU: vLLM's own snapshot of the engine of a bundle, driven and checked here.

Identity is the bundle, whose digest names the directory, and vLLM's manifest, which must have this model, commit and arguments.
vLLM compares host, device, driver, versions and variables itself. The image is read only from a private directory of this user
and for a trusted bundle. The restored server must return the bundle's canary token. The port answers before that check, because
vLLM chooses when it listens. Not run on a device by this project.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts import canonical, ownership
from coldstart.artifacts.bundle import Bundle
from coldstart.contract import fallback
from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError, LaunchRefusedError, describe_reason
from coldstart.launch.completions import CompletionClient, NoAnswerError
from coldstart.launch.listening import DEFAULT_HOST, DEFAULT_PORT
from coldstart.launch.server_process import Running
from coldstart.models.inspection import Lookup
from coldstart.system import timeline
from coldstart.system.snapshot import runtime_image
from coldstart.vllm import gpu_starts
from coldstart.vllm.gpu_starts import Limit

if TYPE_CHECKING:
    from coldstart.launch.planning import ServerStart

MANIFEST = "manifest.json"
TIMEOUT = "VLLM_SNAPSHOT_TIMEOUT_S"
ANSWER_S = 120.0
_END_S = 10.0


class RestoredServer:
    """A server that `vllm snapshot restore` left: processes that are no children of this one, the server's own first."""

    def __init__(self, tree: Sequence[int]) -> None:
        self.pid, self._asked = tree[0], False
        self._handles = [os.pidfd_open(pid) for pid in tree]

    def fileno(self) -> int:
        """Return the pidfd of the server."""
        return self._handles[0]

    def wait(self) -> int:
        """Wait until the server has ended, and kill the rest of its processes. Return 0 if it was asked to end, else 1."""
        select.select([self], [], [])
        for handle in self._handles[1:]:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])
        return 0 if self._asked else 1

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self._asked = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handles[0], number)


def find_missing(start: ServerStart) -> Limit | None:
    """Return what this start lacks for a restore, None if nothing."""
    lookup, given = start.request.lookup, start.plan.vllm_args
    model = lookup.model
    if limit := gpu_starts.find_snapshot_limit(given, model.repo_id, model.revision, os.environ):
        return limit
    if lookup.bundle is None or not exists(lookup, lookup.bundle):
        return "vLLM has no snapshot of this bundle", lookup.format_materialize("--snapshot")
    return None


def exists(lookup: Lookup, bundle: Bundle) -> bool:
    """Return whether vLLM has written a complete snapshot of the bundle's engine."""
    return (_place(lookup, bundle) / MANIFEST).is_file()


def create(lookup: Lookup, bundle: Bundle) -> None:
    """Have vLLM start the engine of `bundle` and write its snapshot.

    Raises:
        CommandFailedError: A limit of vLLM forbids it, or vLLM failed.
    """
    model = lookup.model
    limit = gpu_starts.find_snapshot_limit(lookup.vllm_args, model.repo_id, model.revision, os.environ)
    if limit is not None:
        raise CommandFailedError(f"cannot create a snapshot: {limit[0]}", hint=limit[1])
    place = _place(lookup, bundle)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # vLLM wants a new directory, and a killed run leaves one without a manifest.
    shutil.rmtree(place, ignore_errors=True)
    _run(gpu_starts.create_snapshot(place, _engine(lookup)), {})


def restore(start: ServerStart) -> Running:
    """Have vLLM restore the server, and compare its tokens with the bundle's canary.

    Raises:
        LaunchRefusedError: The snapshot does not fit, vLLM refuses it, or the tokens differ.
        BundleError: The bundle is not trusted.
    """
    lookup, given = start.request.lookup, start.plan.vllm_args
    assert lookup.bundle is not None, "unavailable() was not asked"
    lookup.bundle.require_trust("compile", start.request.trust)
    place, again = _place(lookup, lookup.bundle), lookup.format_materialize("--snapshot", "--force")
    if (reason := ownership.ensure_private_directory(place)) is not None:
        raise LaunchRefusedError(f"the snapshot is not private: {reason}", again)
    try:
        manifest: Any = canonical.read_json(place / MANIFEST)
        reason = gpu_starts.find_difference(manifest, _engine(lookup), lookup.model.revision or "")
        tree = gpu_starts.read_tree(manifest)
    except (OSError, ValueError, AttributeError) as error:
        raise LaunchRefusedError(
            f"cannot read the snapshot of vLLM: {describe_reason(error)}", again
        ) from error
    if reason is not None:
        raise LaunchRefusedError(f"the snapshot is of another engine: {reason}", again)
    timeout = start.request.ready_timeout
    try:
        _run(
            gpu_starts.restore_snapshot(place, *_find_address(given)),
            {} if timeout is None else {TIMEOUT: str(timeout)},
        )
        process = RestoredServer(tree)
    except (CommandFailedError, OSError) as error:
        raise LaunchRefusedError(str(error), again) from error
    try:
        start.request.observe(process.pid)
        return _check(start, process)
    except BaseException:
        process.signal(signal.SIGTERM)
        if not select.select([process], [], [], _END_S)[0]:
            process.signal(signal.SIGKILL)
        process.wait()
        raise


def _check(start: ServerStart, process: RestoredServer) -> Running:
    """Return the server if its greedy tokens are those of the canary. Raises LaunchRefusedError."""
    plan, known = start.plan, start.plan.canary
    tokens: list[int] = []
    if known is not None:
        client = CompletionClient(*_find_address(plan.vllm_args), ANSWER_S)
        try:
            tokens = list(client.complete(known["prompt"], len(known["tokens"])).tokens)
        except NoAnswerError as error:
            raise LaunchRefusedError(f"the restored server gave no answer: {error}") from error
        if tokens != known["tokens"]:
            raise LaunchRefusedError("the restored server gave other tokens than the bundle's canary")
    report = {
        "fast_path": {"snapshot": True},
        "fallbacks": fallback.encode(plan.fallbacks),
        "tokens": tokens,
        "canary": None if known is None else True,
    }
    return Running(process, report, timeline.now() - start.began)


def _find_address(given: Arguments) -> tuple[str, int]:
    return str(given.value("host") or DEFAULT_HOST), given.number("port", DEFAULT_PORT)


def _place(lookup: Lookup, bundle: Bundle) -> Path:
    return runtime_image.choose_engine_image_directory(lookup.cache.runtimes, bundle.digest)


def _engine(lookup: Lookup) -> list[str]:
    model = lookup.model
    return gpu_starts.engine_arguments(
        model.repo_id or "", model.revision or "", model.name, lookup.vllm_args
    )


def _run(command: Sequence[str], variables: dict[str, str]) -> None:
    """Run a command of vLLM until it ends. Raises CommandFailedError with the end of its output."""
    done = subprocess.run(
        command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines() or ["no message"]
        raise CommandFailedError(f"vllm {command[3]} {command[4]} failed: {lines[-1]}")
