"""Weights fetched during a start give the same tokens, also with several ranks."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.range_server import run_server
from tools.machine import Machine, Tokens

from coldstart.weights.prefetch import client

pytestmark = pytest.mark.vllm
FILE = "model.safetensors"
# Slow enough that the loader always waits.
SLOW = 200e3


@pytest.fixture(scope="module")
def model(machine: Machine, bundle: Any) -> Path:
    """tiny-llama with its weights."""
    (found,) = (machine.cache / "models").glob("*/tiny-llama")
    return found


@pytest.fixture(scope="module")
def bare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama without its weights."""
    place = tmp_path_factory.mktemp("bare") / "tiny-llama"
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("*.safetensors"))
    return place


@pytest.fixture(autouse=True)
def _stop_prefetchers(machine: Machine) -> Iterator[None]:
    yield
    with suppress(client.PrefetchError):
        client.request("stop", directory=machine.root / "run" / "coldstart")


def test_weights_from_http_answer_vllms_tokens(
    machine: Machine, bare: Path, model: Path, reference: Tokens, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    with run_server(model) as source:
        given = ("--weights-from", source.url, "--timeline", str(trace), "--progress", "json")
        with machine.serving(str(bare), "--mode", "fresh", *given) as served:
            assert served.report["canary"] is True and served.report["fallbacks"] == []
            (load,) = served.report["loads"]
            size = (model / FILE).stat().st_size
            assert load["way"] == "prefetcher" and load["bytes"] < load["fetch"]["fetched_bytes"] == size
            assert served.tokens() == reference
            lines = [line for line in served.log.read_text().splitlines() if '"event": "step"' in line]
            figures = {step for line in lines if "load weights: " in (step := json.loads(line)["step"])}
            assert len(figures) >= 2, lines
        assert source.total(FILE) == size and source.repeated(FILE) == 0
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    spans = {event["name"]: event for event in events}
    assert {"fetch weights", "import vllm", "configure", "construct model", "read tensors"} <= spans.keys()
    fetched = spans["fetch weights"]
    assert spans["restore compiled forward"]["ts"] < spans["read tensors"]["ts"]
    assert fetched["ts"] < spans["import vllm"]["ts"] + spans["import vllm"]["dur"]
