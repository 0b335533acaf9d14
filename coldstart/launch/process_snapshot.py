"""Process snapshots: CRIU dumps a template process (freeze) and restores it (thaw).

The frozen process is a template with a built engine, or with only the imported runtime. An image of the runtime contains
no user's model and can start every model. A template has no port, event loop or client, so one snapshot starts any number of
servers at any address, each in its own namespaces.

The image refers to files by path, also to the unpacked kernels of its bundle. It contains the content digests of these
files (fingerprint.py) and the variables that it has read (template_environment.py). Its large memory, mainly the weights,
is one file that every restored process maps (criu_memory.py), in the directory of the template's socket.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from coldstart.artifacts import canonical, files, ownership
from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError, LaunchRefusedError
from coldstart.launch import prepare, template_environment, template_pool
from coldstart.launch.server_process import RestoredTemplate
from coldstart.models import tiny
from coldstart.system import fingerprint, paths, runtime
from coldstart.system.ipc.peers import await_readable
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.proc.lifeline import die_with_parent
from coldstart.system.snapshot import criu, criu_memory, runtime_image

# Prefix of the directories of restored templates.
PREFIX = "thawed-"
_OPTIONS = ["--file-locks", "--ext-unix-sk", "--tcp-established", "--link-remap", "-v1"]
# A private mount gives each restored template its own socket directory at the path of the frozen one.
_THAW = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


def freeze_template(plan: LaunchPlan, out: Path, timeout: float, level: str = "engine") -> str | None:
    """Start a template for `plan`, and dump it to the existing directory `out`.

    Returns:
        The reason why restored processes cannot share the image's memory, or None if they can.

    Raises:
        CommandFailedError: CRIU is unavailable, or the template or the dump failed.
    """
    _require_criu(level)
    meeting = create_frozen_socket_dir()
    # All frozen templates listen at the same path, so only one can be created at a time.
    with files.hold_lock(meeting / "lock"):
        process = template_pool.spawn_template(
            level, plan, meeting / "socket", subprocess.DEVNULL, timeout, bound=True, alone=True
        )
        try:
            (template,) = processes.list_children(process.pid)
            fingerprint.write_fingerprint(template, meeting / fingerprint.MODULES, out)
            done = criu.run_criu(
                "dump", "-t", str(template), "-D", str(out), "-o", "dump.log", *_OPTIONS, *criu.list_options()
            )
        finally:
            _end(process)
            _clear(meeting)
    if done.returncode != 0:
        raise CommandFailedError(
            f"cannot freeze the {level} with CRIU: {find_first_error(out / 'dump.log')}",
            hint="run `coldstart doctor` to find the cause",
        )
    read = template_environment.select_relevant(template_environment.build_environment(os.environ, plan))
    _, vllm = runtime.find_vllm_distribution() or ("", "")
    about = {
        "criu": criu.read_version(*criu.find_command()),
        "environment": read,
        "meeting": str(meeting),
        "vllm": vllm,
    }
    about |= {"python": sys.executable, "made": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    (out / runtime_image.ABOUT).write_text(json.dumps(about, sort_keys=True))
    try:
        criu_memory.move_memory(out, meeting / criu_memory.MEMORY_FILE)
    except criu_memory.UnknownImageError as error:
        return f"{error}, so each thawed process reads all of its memory from the image"
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):  # CRIU has ended the frozen process
        for pid in processes.list_children(process.pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _clear(meeting: Path) -> None:
    """Remove the frozen template's files from its socket directory. A restored template does not need them."""
    for left in meeting.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != "lock":
            left.unlink(missing_ok=True)


def thaw_engine(bundle: Bundle, plan: LaunchPlan, cache: Cache, trust: TrustCheck) -> RestoredTemplate:
    """Restore the frozen engine of `bundle` for the server of `plan`.

    Raises:
        LaunchRefusedError: CRIU cannot run, or the snapshot is missing or does not fit this machine or this start.
        BundleError: The bundle is not trusted.
    """
    bundle.require_trust("compile", trust)
    return restore_template(runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest), plan)


def _meeting(images: Path) -> Path:
    """Return the socket directory of the frozen template.

    Raises:
        LaunchRefusedError: The path is unknown, or is not in a private directory on this machine.
    """
    try:
        meeting = Path(canonical.read_json(images / runtime_image.ABOUT)["meeting"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchRefusedError("the snapshot does not record its socket directory") from error
    if (reason := ownership.ensure_private_directory(meeting.parent)) is not None:
        raise LaunchRefusedError(f"the snapshot needs the directory {meeting.parent}: {reason}")
    return meeting


def require_matching_image(images: Path, plan: LaunchPlan) -> None:
    """Check that this machine's files and the environment of this start match the image.

    Raises:
        LaunchRefusedError: A file or a variable differs.
    """
    reason = fingerprint.find_mismatch(images, "snapshot")
    if reason is None:
        read = canonical.read_json(images / runtime_image.ABOUT)["environment"]
        reason = template_environment.find_difference(read, os.environ | plan.env, "snapshot")
    if reason is not None:
        raise LaunchRefusedError(reason)


def restore_template(images: Path, plan: LaunchPlan) -> RestoredTemplate:
    """Restore the template from its CRIU image in the directory `images`, to run the server of `plan`.

    Raises:
        LaunchRefusedError: The image is missing, is not private or does not fit, or CRIU cannot run or fails.
        OSError: A directory cannot be created.
    """
    if (limit := criu.find_limit()) is not None:
        raise LaunchRefusedError(*limit)
    if (reason := runtime_image.explain_unreadable(images)) is not None:
        raise LaunchRefusedError(reason)
    meeting = _meeting(images)
    meeting.mkdir(parents=True, exist_ok=True, mode=0o700)
    base, stack = paths.runtime_dir(), ExitStack()
    own = stack.enter_context(files.create_owned_directory(base, PREFIX))
    if (images / criu_memory.MEMORY_FILE).exists():
        (own / criu_memory.MEMORY_FILE).symlink_to(images.absolute() / criu_memory.MEMORY_FILE)
    os.mkfifo(own / "resumed")
    resumed = os.open(own / "resumed", os.O_RDONLY | os.O_NONBLOCK)
    thawed = RestoredTemplate(own, _spawn(images, meeting, own), stack.close)
    try:
        # This runs while CRIU restores: the template does nothing before a request.
        require_matching_image(images, plan)
    except BaseException:
        thawed.end()
        os.close(resumed)
        raise
    pidfd = os.pidfd_open(thawed.pid)
    ended = pidfd in await_readable(resumed, pidfd)
    os.close(pidfd)
    os.close(resumed)
    if ended:
        reason = find_first_error(own / "restore.log")
        thawed.end()
        raise LaunchRefusedError(f"cannot thaw the snapshot with CRIU: {reason}")
    return thawed


def _spawn(images: Path, meeting: Path, own: Path) -> subprocess.Popen[bytes]:
    namespaces = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", _THAW, "sh"]
    acknowledge = own / "acknowledge"
    acknowledge.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-resume ] || echo > "{own}/resumed"\n'
    )
    acknowledge.chmod(0o700)
    # CRIU writes to this work directory, so the images stay unchanged and may be read-only.
    restore = [
        *criu.find_command(),
        "restore",
        "-D",
        str(images),
        "-W",
        str(own),
        "-o",
        "restore.log",
        *_OPTIONS,
        *criu.list_options(),
    ]
    return subprocess.Popen(
        [*namespaces, str(own), str(meeting), *restore, "--action-script", str(acknowledge)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # If this process dies, the kernel kills unshare, and unshare's child and PID namespace with it.
        preexec_fn=partial(die_with_parent, signal.SIGKILL),  # noqa: PLW1509 - only prctl, and this process has no other thread
    )


def create_frozen_socket_dir() -> Path:
    """Return the socket directory of frozen templates, over which each restored template mounts its own private directory."""
    directory = paths.frozen_dir() / "meeting"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def find_first_error(log: Path) -> str:
    """Return the first error in CRIU's log. Later errors are its consequences."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    complaints = [line for line in lines if "Error" in line]
    return complaints[0] if complaints else "the log contains no error"


def _require_criu(level: str) -> None:
    if (limit := criu.find_limit()) is not None:
        raise CommandFailedError(
            f"cannot create a snapshot of the {level}: {limit[0]}",
            hint="run `coldstart doctor` to find the cause",
        )


def freeze_runtime(cache: Cache, timeout: float) -> Path:
    """Create or replace the runtime snapshot of this interpreter, and return its directory.

    Raises:
        CommandFailedError: The image cannot be created.
    """
    _require_criu("runtime")
    image = runtime_image.choose_image_directory(cache.runtimes)
    model = tiny.build_tiny_model("tiny-llama", cache.models)
    # Use the variables of a start from a bundle, because Inductor reads them when it is imported.
    caches = cache.vllm_cache_dir(image.name)
    env = prepare.build_base_env(caches) | prepare.build_inductor_env(caches)
    plan = LaunchPlan(Arguments(["--model", str(model)]), env=env)
    try:
        with runtime_image.publish_image(image) as partial:
            freeze_template(plan, partial, timeout, level="runtime")
    except OSError as error:
        raise CommandFailedError(
            f"cannot write the image in {cache.runtimes}: {error.strerror or error}",
            hint="free space with `coldstart prune`, or use another disk with --cache-dir DIR",
        ) from error
    return image


def find_runtime(cache: Cache) -> Path | None:
    """Return the directory of this interpreter's runtime snapshot, or None if there is none."""
    if not cache.runtimes.is_dir():
        return None
    image = runtime_image.choose_image_directory(cache.runtimes)
    return image if image.is_dir() else None
