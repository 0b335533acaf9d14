"""Find the CRIU program, check that it may run here, and run it.

COLDSTART_CRIU specifies a CRIU program to use instead of the one in PATH.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from coldstart.contract import environment
from coldstart.system.proc import processes

VARIABLE = environment.CRIU
# Capabilities as bits of CapEff: CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE; CAP_SYS_RESOURCE.
_CAPABILITIES = (1 << 21) | (1 << 40)
_RESOURCE = 1 << 24
# CRIU 3.17, which Debian 12 has, cannot freeze a process on a recent kernel.
_OLDEST = (4, 2)
_NR_OPEN = Path("/proc/sys/fs/nr_open")
_BUILD = (
    f"build CRIU 4.2 or newer from https://github.com/checkpoint-restore/criu, then export {VARIABLE}=PATH"
)


def find_command() -> list[str]:
    """Return the command line of CRIU without options. Raises FileNotFoundError if CRIU is missing."""
    program = VARIABLE.read() or shutil.which("criu")
    if not program or not os.access(program, os.X_OK):
        raise FileNotFoundError(program or "criu")
    return [program]


def find_limit() -> tuple[str, str] | None:
    """Return the reason why processes cannot be checkpointed or restored here, and a hint, or None if they can."""
    try:
        (program,) = find_command()
    except FileNotFoundError as error:
        return f"{error} was not found: install criu (4.2 or newer), or set {VARIABLE}", _BUILD
    found = read_version(program)
    if found is not None and tuple(map(int, found.split("."))) < _OLDEST:
        return f"{program} is CRIU {found}: 4.2 or newer is required", _BUILD
    if shutil.which("unshare") is None:
        return "unshare (util-linux) was not found", "apt-get install util-linux"
    if _read_capabilities() & _CAPABILITIES != _CAPABILITIES:
        how = "run as root; container: --cap-add SYS_ADMIN --cap-add CHECKPOINT_RESTORE"
        return (
            "CRIU needs CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE: run as root, or in a container with both",
            how,
        )
    return None


@functools.cache
def read_version(program: str) -> str | None:
    """Return the version that the program reports, such as "4.2.1", or None if it does not report one."""
    try:
        report = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    match = re.search(r"\d+(?:\.\d+)+", report)
    return match[0] if match else None


def list_options() -> list[str]:
    """Return the options that every dump and restore needs on this machine.

    CRIU raises its open-file limit to the kernel's maximum and exits if it may not, as in most containers, which lack
    CAP_SYS_RESOURCE. With --unprivileged it keeps its limit, and needs only the capabilities that this module checks for.
    """
    most, hard = int(_NR_OPEN.read_text()), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    may_raise = _read_capabilities() & _RESOURCE
    return [] if may_raise or hard >= most else ["--unprivileged"]


def run_criu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run CRIU, and wait until it exits. Raises FileNotFoundError if CRIU is not installed."""
    return subprocess.run([*find_command(), *arguments], capture_output=True, text=True, check=False)


def _read_capabilities() -> int:
    return int(processes.read_field("/proc/self/status", "CapEff") or "0", 16)
