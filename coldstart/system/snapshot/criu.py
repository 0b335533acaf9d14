"""The CRIU program: where it is, whether it may run here, and running it.

COLDSTART_CRIU names a program that is not in PATH (a newer one unpacked beside the system's, say).
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import subprocess
from pathlib import Path

from coldstart.contract import environment

VARIABLE = environment.CRIU
# Capabilities as bits of CapEff: CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE; CAP_SYS_RESOURCE.
_CAPABILITIES = (1 << 21) | (1 << 40)
_RESOURCE = 1 << 24
_NR_OPEN = Path("/proc/sys/fs/nr_open")


def command() -> list[str]:
    """The program as an argument vector. Raises FileNotFoundError where there is none."""
    program = VARIABLE.read() or shutil.which("criu")
    if not program or not os.access(program, os.X_OK):
        raise FileNotFoundError(program or "criu")
    return [program]


def missing() -> str | None:
    """Why no process can be frozen or thawed here, or None."""
    try:
        command()
    except FileNotFoundError as error:
        return f"{error} is not to be found: install criu (4.2 or newer for Linux 6.18), or name it in {VARIABLE}"
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not to be found"
    held = int(_status("CapEff") or "0", 16)
    if held & _CAPABILITIES != _CAPABILITIES:
        return "CRIU needs CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE: run as root, or in a container with both"
    # It raises its own limit of open files to the kernel's before all else, and ends where it may not.
    most, hard = int(_NR_OPEN.read_text()), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if not held & _RESOURCE and hard < most:
        return (
            f"CRIU raises its limit of open files to fs.nr_open ({most}), past the hard limit here ({hard}): it needs "
            f"CAP_SYS_RESOURCE, or a hard limit as high (podman run --ulimit nofile={most})"
        )
    return None


@functools.cache
def version() -> str:
    """Its version, as in "4.2.1". Raises FileNotFoundError."""
    return run("--version").stdout.split()[-1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end. Raises FileNotFoundError."""
    return subprocess.run([*command(), *arguments], capture_output=True, text=True, check=False)


def _status(field: str) -> str | None:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.split()[1] for line in lines if line.startswith(field + ":")), None)
