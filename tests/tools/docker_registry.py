"""A real OCI registry from Debian's docker-registry package, for tests.

The package is unpacked into the user's cache; nothing is installed and nothing runs as a service.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import debian
from tools.debian import Unavailable

from coldstart.system.ipc.addresses import free_port

_PACKAGE = "docker-registry"


def binary() -> Path:
    """Return the registry's executable, downloaded on first use. Raises Unavailable."""
    installed = shutil.which(_PACKAGE)
    if installed:
        return Path(installed)
    return debian.unpacked(_PACKAGE) / "usr" / "bin" / _PACKAGE


@contextmanager
def serving(scratch: Path) -> Iterator[str]:
    """A registry that keeps its blobs in `scratch`; yields HOST:PORT. Raises Unavailable."""
    port = free_port()
    config = scratch / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{scratch / 'registry'}'}}}}\n"
    )
    process = subprocess.Popen(
        [binary(), "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(process, port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise Unavailable(f"the registry ended with status {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise Unavailable("the registry does not answer")
