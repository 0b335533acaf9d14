"""Read the lock files of requirements/ and resolve them with PyPI alone, without the machine's own configuration."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "requirements"
# As in pyproject.toml's [tool.uv]: PyPI carries torch without the local part of its version, and the others are left out.
OVERRIDES = "torch==2.13.0\n"
EXCLUDES = "torchaudio\ntorchcodec\ntorchvision\n"


def pins(path: Path, environment: Mapping[str, str]) -> Iterator[Requirement]:
    """Parse the pins of one lock file that hold in `environment` (markers' variables; the rest is this machine's).

    Raises ValueError for a line that is not one exact version.
    """
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith(("#", "    --hash=")):
            continue
        pin = Requirement(line.removesuffix(" \\"))
        if [clause.operator for clause in pin.specifier] != ["=="] or pin.url:
            raise ValueError(f"{path.name}: {line!r} does not pin one version")
        if pin.marker is None or pin.marker.evaluate(dict(environment)):
            pin.name = canonicalize_name(pin.name)
            yield pin


def selection(python: str, *paths: Path) -> dict[str, str]:
    """Return the pinned version of each package for one Python version, as in "3.12"."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found = (pin for path in paths for pin in pins(path, environment))
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in found}


def resolve(pinned: Mapping[str, str], python: str) -> dict[str, str]:
    """Resolve pins with their requirements for one Python version, on Linux for x86-64, and return all versions.

    The result has a package that `pinned` lacks where the pins are incomplete. Nothing is installed.

    Raises RuntimeError where the pins contradict each other or PyPI cannot be reached.
    """
    with tempfile.TemporaryDirectory() as directory:
        overrides, excludes = Path(directory, "overrides"), Path(directory, "excludes")
        overrides.write_text(OVERRIDES)
        excludes.write_text(EXCLUDES)
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "-",
            "--no-header",
            "--no-annotate",
            "--quiet",
        ]
        command += ["--no-config", "--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
        command += ["--overrides", str(overrides), "--excludes", str(excludes)]
        given = "".join(f"{name}=={version}\n" for name, version in pinned.items())
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, check=False, env=pypi_alone(), cwd=directory
        )
    if done.returncode:
        raise RuntimeError(f"the lock cannot be resolved for Python {python}: {done.stderr}")
    lines = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in lines}


def pypi_alone() -> dict[str, str]:
    """Return this process's environment without any source of packages but PyPI."""
    sources = ("FIND_LINKS", "EXTRA_INDEX_URL", "INDEX_URL", "INDEX", "DEFAULT_INDEX", "CONSTRAINT")
    removed = {f"{tool}_{source}" for tool in ("PIP", "UV") for source in sources}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}
