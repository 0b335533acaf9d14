"""Process snapshots: a template frozen by CRIU, thawed where the machine permits it.

What is frozen is a template, with an engine built (a bundle's `snapshot`) or the runtime alone (runtime_snapshot.py), and not
a server: it holds no port, no event loop and no client, so one snapshot starts any number of servers, at any address, in
namespaces of their own. The image is bound to files by path, so the compiled kernels it maps are unpacked to one place per user
that does not depend on the cache root, and it carries the content digests of all that it was made of (fingerprint.py) and the
variables that it has read (template_environment.py). Its large memory, the weights above all, is a file that every thawed
process maps (criu_memory.py); like the kernels it is named by where the frozen template listened.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from coldstart.artifacts.bundle import Bundle, Trust
from coldstart.artifacts.files import locked
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import template_environment, template_pool
from coldstart.system import fingerprint, paths
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.proc.lifeline import die_with_parent
from coldstart.system.snapshot import criu, criu_memory
from coldstart.system.trust import ownership
from coldstart.system.trust.unpacked import unpacked

ABOUT = "snapshot.json"
_PREFIX, _GUARDIAN = "thawed-", "guardian"
_OPTIONS = ["--file-locks", "--ext-unix-sk", "--tcp-established", "--link-remap", "-v1"]
# A private mount lets every thawed template create its socket in a directory of its own under the frozen path.
_THAW = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'


class SnapshotUnusableError(RuntimeError):
    """The snapshot cannot be thawed here; the message says what was wanted and what was found."""


def freeze(plan: LaunchPlan, out: Path, timeout: float, level: str = "engine") -> str | None:
    """Build a template for `plan` and freeze it into the existing directory `out`; why its memory cannot be shared, if so.

    Raises SnapshotUnusableError where CRIU is missing or may not run, CommandFailedError when the template or the dump fails.
    """
    if (reason := criu.missing()) is not None:
        raise SnapshotUnusableError(reason)
    meeting = meeting_dir()
    # One at a time: every frozen template listens at the same place.
    with locked(meeting / "lock"):
        process = template_pool.spawn(
            level, plan, meeting / "socket", subprocess.DEVNULL, timeout, bound=True, alone=True
        )
        try:
            (template,) = processes.children(process.pid)
            fingerprint.write(template, meeting / fingerprint.MODULES, out)
            done = criu.run("dump", "-t", str(template), "-D", str(out), "-o", "dump.log", *_OPTIONS)
        finally:
            _end(process)
            _clear(meeting)
    if done.returncode != 0:
        raise CommandFailedError(
            f"CRIU could not freeze the {level}: {first_error(out / 'dump.log')}", hint="coldstart doctor"
        )
    read = template_environment.counted(template_environment.spawned(os.environ, plan))
    about = {"criu": criu.version(), "environment": read, "meeting": str(meeting)}
    (out / ABOUT).write_text(json.dumps(about, sort_keys=True))
    try:
        criu_memory.move(out, meeting / criu_memory.MEMORY)
    except criu_memory.UnknownImageError as error:
        return f"{error}: each process that is thawed reads all of its own memory"
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """The template, where it still lives, and then the process that waits for it."""
    with suppress(OSError):  # it has gone: what is frozen is ended
        for pid in processes.children(process.pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _clear(meeting: Path) -> None:
    """Remove what the frozen template left where it listened; it is thawed without."""
    for left in meeting.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != "lock":
            left.unlink(missing_ok=True)


class Thawed:
    """A thawed template: where it listens, and the process that holds its namespaces."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.directory, self.process, self.pid = directory, process, process.pid

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "socket"

    def end(self) -> None:
        """End the template and all that lives in its namespaces, and leave nothing behind."""
        inside = _pidfds(self.pid)
        if self.process.poll() is None:  # not yet reaped: the number is still its own
            # All at once: CRIU may still be at work, and what it forks now is in the group as well.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        for pidfd in inside:  # the first process of a pid namespace ends last; until then CRIU may write
            select.select([pidfd], [], [])
            os.close(pidfd)
        shutil.rmtree(self.directory, ignore_errors=True)


def _pidfds(parent: int) -> list[int]:
    """A descriptor of each child that `parent` has now."""
    found: list[int] = []
    with suppress(OSError):
        for child in processes.children(parent):
            with suppress(ProcessLookupError):
                found.append(os.pidfd_open(child))
    return found


def thaw(bundle: Bundle, plan: LaunchPlan, cache: Cache, trust: Trust) -> Thawed:
    """Thaw the bundle's snapshot for the server that `plan` describes.

    Raises SnapshotUnusableError with the reason, BundleError when the section is missing, damaged or not trusted.
    """
    if (reason := criu.missing()) is not None:
        raise SnapshotUnusableError(reason)
    images = unpacked(bundle, "snapshot", cache.unpacked, trust)
    if bundle.has("compile"):
        _unpack_kernels(bundle, images, trust)
    return restored(images, plan)


def _meeting(images: Path) -> Path:
    """Where the frozen template listened, beside its kernels.

    Raises SnapshotUnusableError where that is no private place here.
    """
    try:
        meeting = Path(json.loads((images / ABOUT).read_text())["meeting"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotUnusableError("the snapshot does not say where it was frozen") from error
    if (reason := ownership.private(meeting.parent)) is not None:
        raise SnapshotUnusableError(f"the snapshot was frozen at {meeting.parent}, and {reason}")
    return meeting


def _unpack_kernels(bundle: Bundle, images: Path, trust: Trust) -> None:
    # The image maps them there, and nowhere else.
    try:
        unpacked(bundle, "compile", _meeting(images).parent, trust, exact=True)
    except OSError as error:
        raise SnapshotUnusableError(
            f"the kernels that the snapshot maps cannot be unpacked: {error}"
        ) from error


def check(images: Path, plan: LaunchPlan) -> None:
    """Raise SnapshotUnusableError unless this machine has the image's files and this start asks for what the image has read."""
    reason = fingerprint.obstacle(images, "snapshot")
    if reason is None:
        read = json.loads((images / ABOUT).read_text())["environment"]
        reason = template_environment.difference(read, os.environ | plan.env, "snapshot")
    if reason is not None:
        raise SnapshotUnusableError(reason)


def restored(images: Path, plan: LaunchPlan) -> Thawed:
    """The template of `images`, a directory that nobody else can write to, thawed for the server that `plan` describes.

    Raises SnapshotUnusableError with the reason, OSError.
    """
    meeting = _meeting(images)
    meeting.mkdir(parents=True, exist_ok=True, mode=0o700)
    sweep()
    own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=paths.runtime_dir()))
    if (images / criu_memory.MEMORY).exists():
        (own / criu_memory.MEMORY).symlink_to(images.absolute() / criu_memory.MEMORY)
    os.mkfifo(own / "resumed")
    resumed = os.open(own / "resumed", os.O_RDONLY | os.O_NONBLOCK)
    thawed = Thawed(own, _spawn(images, meeting, own))
    (own / _GUARDIAN).write_text(f"{thawed.pid} {processes.birth(thawed.pid)}")
    try:
        check(images, plan)  # while CRIU works: the template does nothing before it is asked
    except BaseException:
        thawed.end()
        os.close(resumed)
        raise
    pidfd = os.pidfd_open(thawed.pid)
    ended = pidfd in select.select([resumed, pidfd], [], [])[0]
    os.close(pidfd)
    os.close(resumed)
    if ended:
        reason = first_error(own / "restore.log")
        thawed.end()
        raise SnapshotUnusableError(f"CRIU could not thaw the snapshot: {reason}")
    return thawed


def sweep() -> None:
    """Remove what thawed templates left behind whose supervisor was killed. Raises OSError."""
    for record in paths.runtime_dir().glob(f"{_PREFIX}*/{_GUARDIAN}"):
        pid, _, born = record.read_text().partition(" ")
        # Another process may have its number by now.
        if pid and (processes.birth(int(pid)) or "") != born:
            shutil.rmtree(record.parent, ignore_errors=True)


def _spawn(images: Path, meeting: Path, own: Path) -> subprocess.Popen[bytes]:
    namespaces = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", _THAW, "sh"]
    acknowledge = own / "acknowledge"
    acknowledge.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-resume ] || echo > "{own}/resumed"\n'
    )
    acknowledge.chmod(0o700)
    # Its work directory is its own: the images stay as they are, and are read where nobody may write.
    restore = [*criu.command(), "restore", "-D", str(images), "-W", str(own), "-o", "restore.log", *_OPTIONS]
    return subprocess.Popen(
        [*namespaces, str(own), str(meeting), *restore, "--action-script", str(acknowledge)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Not a lease but its own life: unshare kills its child, and with it the pid namespace.
        preexec_fn=_die_with_us,  # noqa: PLW1509 - only prctl, and this process has no other thread
    )


def _die_with_us() -> None:
    die_with_parent(signal.SIGKILL)


def meeting_dir() -> Path:
    """Where a frozen template listens; each thawed one has a directory of its own mounted over it."""
    directory = paths.frozen_dir() / "meeting"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def first_error(log: Path) -> str:
    """CRIU's first complaint: what follows are its consequences."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    complaints = [line for line in lines if "Error" in line]
    return complaints[0] if complaints else "it gave no reason"
