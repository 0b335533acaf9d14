"""A server without typed arguments starts with those of the newest trusted bundle, and with no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import accept_any
from support.engines import home
from support.recorded_models import engine, model
from tools import tiny_models
from tools.recorded import publish_recorded

from coldstart.models import inspection, resolver
from coldstart.models.inspection import Lookup
from coldstart.system import runtime
from coldstart.system.paths import Cache

__all__ = ["engine", "home", "model"]
pytestmark = pytest.mark.usefixtures("engine")
SHORT, LONG = ("--max-model-len", "512"), ("--max-model-len", "1024")
LATER = "2026-02-01T00:00:00Z"


def adopt(model: str) -> Lookup:
    return resolver.adopt_arguments(inspection.look_up(model))


def test_adopt_arguments_takes_none_of_an_untrusted_bundle(model: str) -> None:
    trusted = publish_recorded(model, LONG)
    publish_recorded(model, ("--middleware", "evil.module"), created=LATER, signed=False)
    assert adopt(model).bundle == trusted
    unsigned = resolver.adopt_arguments(inspection.look_up(model, accepts=accept_any))
    assert unsigned.vllm_args == LONG


def test_adopt_arguments_takes_none_with_a_hidden_secret(model: str) -> None:
    publish_recorded(model, ("--max-num-seqs", "4", "--api-key", "***"))
    found = adopt(model)
    assert found.vllm_args == () and found.bundle is None and found.lender is None


def test_adopt_arguments_takes_none_of_another_model_or_machine(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_recorded(model, SHORT)
    (Path(model) / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    assert adopt(model).lender is None
    (Path(model) / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert adopt(model).lender is not None
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.14.0+cpu"})
    assert adopt(model).lender is None


def test_adopt_arguments_fits_a_directory_without_weights(model: str) -> None:
    made = publish_recorded(model, SHORT)
    (Path(model) / "model.safetensors").unlink()
    found = adopt(model)
    assert found.vllm_args == SHORT and found.drop_weights().bundle == made


def test_untrusted_version_is_a_miss_with_the_reason(home: Path) -> None:
    tiny_models.place("tiny-llama", Cache.at().models)
    publish_recorded("tiny-llama", SHORT, signed=False)
    found = resolver.resolve("tiny-llama:v1", SHORT, cache=Cache.at())
    assert found.bundle is None and "is not trusted" in inspection.build_miss_error(found).message
