"""Hosts of this user that run on this machine: once a host listens, its directory contains its URL."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system import paths
from coldstart.system.proc import scratch

_PREFIX, _GATE, _URL = "host-", "host.lock", "url"
# Path of the longest socket below the base in bytes: that of a server.
_BELOW = len(f"/{_PREFIX}12345678/99999.sock")


def own_directory() -> AbstractContextManager[Path]:
    """Return a context manager of the directory for sockets and logs.

    It also removes the directories of hosts that were killed. Raises OSError.
    """
    base = paths.runtime_dir(_BELOW)
    return scratch.owned(base, base / _GATE, _PREFIX)


def publish_url(directory: Path, url: str) -> None:
    """Write the URL of the host to its directory. Raises OSError."""
    (directory / _URL).write_text(url)


def list_urls() -> list[str]:
    """Return the URLs of the hosts that run. Raises OSError, or UsageError without a directory for sockets."""
    base = paths.runtime_dir(_BELOW)
    scratch.sweep_below(base, base / _GATE, _PREFIX)
    return sorted(text for file in base.glob(f"{_PREFIX}*/{_URL}") if (text := files.read_text(file)))
