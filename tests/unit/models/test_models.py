"""Names resolve to models, and every failure has an exit code and a hint."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from coldstart.artifacts.bundle import TrustCheck, accept_any
from coldstart.artifacts.oci import Descriptor
from coldstart.artifacts.oci_layout import OciLayout
from support.recorded_models import engine, model, publish_recorded
from tools import tiny_models

from coldstart.errors import ColdstartError, UsageError
from coldstart.models import inspection, resolution, resolver, tiny
from coldstart.models.inspection import BundleLookup
from coldstart.system import runtime
from coldstart.system.paths import Cache

__all__ = ["engine", "model"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "my model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return place


@pytest.fixture(autouse=True)
def hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(siblings=[SimpleNamespace(rfilename="config.json")], sha=COMMIT)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: answer)


def test_alias_and_repository_are_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "snapshots" / COMMIT / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    asked: list[str] = []

    def download(repo_id: str, *_: Any, **__: Any) -> str:
        asked.append(repo_id)
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolution.resolve("OPT-125m") == resolution.resolve("facebook/opt-125m")
    assert asked == ["facebook/opt-125m"] * 2


def test_a_revision_of_a_directory_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match="--revision"):
        resolution.resolve(str(directory), revision="main")


SHORT, LONG = ("--max-model-len", "512"), ("--max-model-len", "1024")
LATER = "2026-02-01T00:00:00Z"


def adopt(model: str, accepts: TrustCheck | None = None) -> BundleLookup:
    return resolver.look_up_for_start(model, None, cache=Cache.at(), accepts=accepts)


@pytest.mark.usefixtures("engine")
def test_adopt_arguments_takes_none_of_an_untrusted_bundle(model: str) -> None:
    trusted = publish_recorded(model, LONG)
    publish_recorded(model, ("--middleware", "evil.module"), created=LATER, signed=False)
    assert adopt(model).bundle == trusted
    assert adopt(model, accept_any).vllm_args == LONG


@pytest.mark.usefixtures("engine")
def test_a_start_reads_the_index_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, read, real = publish_recorded(model, LONG), list[OciLayout](), OciLayout.read_entries
    inspection.trust(made)  # the record of the verification

    def read_entries(layout: OciLayout) -> list[Descriptor]:
        read.append(layout)
        return real(layout)

    monkeypatch.setattr(OciLayout, "read_entries", read_entries)
    assert adopt(model).bundle == made and len(read) == 1
    assert resolver.look_up_for_start(model, SHORT, cache=Cache.at()).nearest == made and len(read) == 2


@pytest.mark.usefixtures("engine")
def test_adopt_arguments_takes_none_with_a_hidden_secret(model: str) -> None:
    publish_recorded(model, ("--max-num-seqs", "4", "--api-key", "***"))
    found = adopt(model)
    assert found.vllm_args == () and found.bundle is None and found.arguments_bundle is None


@pytest.mark.usefixtures("engine")
def test_adopt_arguments_takes_none_of_others(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_recorded(model, SHORT)
    config = Path(model) / "config.json"
    config.write_text((own := config.read_text()).replace("LlamaForCausalLM", "Qwen2ForCausalLM"))
    assert adopt(model).arguments_bundle is None
    config.write_text(own)
    assert adopt(model).arguments_bundle is not None
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.14.0+cpu"})
    assert adopt(model).arguments_bundle is None


@pytest.mark.usefixtures("engine")
def test_template_command_names_the_version_that_recorded_the_arguments(model: str) -> None:
    publish_recorded(model, SHORT)
    found = adopt(model)
    assert found.arguments_bundle is not None and found.format_template_command("runtime").split()[3] == model
    named = replace(found, model=replace(found.model, name=found.arguments_bundle.name, path=None))
    words = ["coldstart", "template", "start", f"{found.arguments_bundle.name}:v1", "--level", "runtime"]
    assert named.format_template_command("runtime").split() == words


@pytest.mark.usefixtures("engine")
def test_adopt_arguments_fits_a_directory_without_weights(model: str) -> None:
    made = publish_recorded(model, SHORT)
    (Path(model) / "model.safetensors").unlink()
    found = adopt(model)
    assert found.vllm_args == SHORT and found.accept_nearest_without_weights().bundle == made


@pytest.mark.usefixtures("engine")
def test_untrusted_version_is_a_miss_with_the_reason(home: Path) -> None:
    tiny_models.place("tiny-llama", Cache.at().models)
    publish_recorded("tiny-llama", SHORT, signed=False)
    found = resolver.look_up_for_start("tiny-llama:v1", SHORT, cache=Cache.at())
    assert found.bundle is None and "is not trusted" in inspection.build_miss_error(found).message


def test_several_at_once_build_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def child(name: str, draft: Path) -> None:
        calls.append(name)
        (draft / "config.json").write_text("{}")

    monkeypatch.setattr(tiny, "_run_child", child)
    threads = [threading.Thread(target=tiny.build_tiny_model, args=("tiny-opt", tmp_path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["tiny-opt"]
    assert (tiny.build_tiny_model("tiny-opt", tmp_path) / "config.json").is_file()


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (full := tmp_path / "full").write_text("#!/bin/sh\necho I/O error: No space left on device >&2\nexit 1\n")
    full.chmod(0o700)
    reasons = {"/bin/false": "cannot build tiny-llama", str(full): f"no space left while .* in {tmp_path}"}
    for program, reason in reasons.items():
        monkeypatch.setattr("sys.executable", program)
        with pytest.raises(ColdstartError, match=reason):
            tiny.build_tiny_model("tiny-llama", tmp_path)
    full.unlink()
    assert [path.name for path in tmp_path.rglob("*") if not path.name.endswith(".lock")] == ["tiny-v1"]


@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, second = tiny_models.shared("tiny-llama"), tiny.build_tiny_model("tiny-llama", tmp_path)
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {
        f.name: f.read_bytes() for f in second.iterdir()
    }
    held = {file.name for file in first.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= held
    assert "tokenizer_config.json" in held
