"""No mutation of a document or plain section makes a reader crash or write outside its directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.fuzzed import TARGETS, Fuzz, readers, writes_outside

from coldstart.models import inspection
from coldstart.system import runtime
from coldstart.system.paths import Cache


@pytest.mark.slow
def test_readers_refuse_or_read_each_mutation(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime.vllm_distribution() is None:
        pytest.skip("a key needs an installed vLLM")
    model = home / "my-model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    key = dict(inspection.look_up(str(model)).key.fields)
    fuzz = Fuzz(Cache.at().bundles, key, readers(str(model)))
    fuzz.root.mkdir(parents=True)
    with writes_outside(home) as strayed:
        for seed in range(12 * len(TARGETS)):
            fuzz.one(seed)
    assert fuzz.findings == [] and strayed == []
    assert fuzz.refused > 50 and fuzz.read > 50  # some were refused, and not all
