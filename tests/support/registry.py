"""A real OCI registry from Debian's docker-registry package as a fixture.

The package is unpacked into the user's cache; nothing is installed and nothing runs as a service.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.processes import wait_until

from coldstart.system.ipc.addresses import find_free_port

_PACKAGE = "docker-registry"


def _find_binary() -> Path:
    """Return the registry's executable, downloaded on first use. Skip the test where that is impossible."""
    if installed := shutil.which(_PACKAGE):
        return Path(installed)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldstart-tests" / _PACKAGE
    if not (home / "usr").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, ignore_cleanup_errors=True) as scratch:
            try:
                if _run(scratch, "apt-get", "download", _PACKAGE).returncode:
                    _run(scratch, "apt-get", "update").check_returncode()
                    _run(scratch, "apt-get", "download", _PACKAGE).check_returncode()
                (package,) = Path(scratch).glob("*.deb")
                _run(scratch, "dpkg", "-x", str(package), "unpacked").check_returncode()
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"{_PACKAGE} cannot be downloaded: {error}")
            with suppress(OSError):  # another worker was faster
                Path(scratch, "unpacked").rename(home)
    return home / "usr" / "bin" / _PACKAGE


def _run(directory: str, *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=directory, capture_output=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a running registry."""
    scratch, port = tmp_path_factory.mktemp("registry"), find_free_port()
    config = scratch / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{scratch / 'registry'}'}}}}\n"
    )
    command = [_find_binary(), "serve", config]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_open(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
