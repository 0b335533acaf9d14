"""Unpack programs from Debian packages into the user's cache, without installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


class Unavailable(Exception):
    """The program is unavailable; the message has the reason."""


def unpacked(package: str, *needed: str) -> Path:
    """Return the directory with a package and the libraries that it needs; download them on first use.

    Raises:
        Unavailable: The package cannot be downloaded or unpacked.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldstart-tests" / package
    if not (home / "usr").exists():
        _fetch(home, (package, *needed))
    return home


def _fetch(home: Path, packages: tuple[str, ...]) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Unavailable(f"{packages[0]} and apt-get are not installed")
    scratch = home.with_name(f"{home.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        _download(scratch, packages)
        for package in scratch.glob("*.deb"):
            _run(["dpkg", "-x", str(package), "."], scratch)
            package.unlink()
        scratch.rename(home)
    except OSError as error:
        if (home / "usr").exists():  # another worker was faster
            return
        raise Unavailable(f"{packages[0]} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(scratch: Path, packages: tuple[str, ...]) -> None:
    try:
        _run(["apt-get", "download", *packages], scratch)
    except Unavailable:
        _run(["apt-get", "update"], scratch)
        _run(["apt-get", "download", *packages], scratch)


def _run(command: list[str], directory: Path) -> None:
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=120)
    except (subprocess.SubprocessError, OSError) as error:
        raise Unavailable(f"{' '.join(command)} failed: {error}") from error
