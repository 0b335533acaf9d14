"""A real OCI registry from Debian's docker-registry package, for tests. As a script it prints its path.

The package is unpacked into the user's cache; nothing is installed and nothing runs as a service.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKAGE = "docker-registry"


class Unavailable(Exception):
    """The registry cannot be had here; the message says why."""


def binary() -> Path:
    """The registry's executable, fetched on first use. Raises Unavailable."""
    installed = shutil.which(_PACKAGE)
    if installed:
        return Path(installed)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldstart-tests" / _PACKAGE
    found = home / "usr" / "bin" / _PACKAGE
    if not found.exists():
        _fetch(home)
    return found


@contextmanager
def serving(scratch: Path) -> Iterator[str]:
    """A registry that keeps its blobs in `scratch`; yields HOST:PORT. Raises Unavailable."""
    port = _free_port()
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


def _fetch(home: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable("docker-registry is not installed, and there is no apt-get to fetch it with")
    scratch = home.with_name(f"{home.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        _download(scratch)
        package = next(scratch.glob("*.deb"))
        _run(["dpkg", "-x", package.name, "."], scratch)
        package.unlink()
        scratch.rename(home)
    except (OSError, StopIteration) as error:
        if (home / "usr").exists():  # another worker was faster
            return
        raise Unavailable(f"docker-registry cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path) -> None:
    try:
        _run(["apt-get", "download", _PACKAGE], scratch)
    except Unavailable:
        _run(["apt-get", "update"], scratch)
        _run(["apt-get", "download", _PACKAGE], scratch)


def _run(command: list[str], directory: Path) -> None:
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"{' '.join(command)} failed: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(300):
        if process.poll() is not None:
            raise Unavailable(f"the registry ended with status {process.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise Unavailable("the registry does not answer")


if __name__ == "__main__":
    print(binary())
