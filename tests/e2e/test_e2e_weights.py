"""Weights fetched during a start give the same tokens, also with several ranks."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.range_server import RangeServer, run_server
from tools.machine import TRACED, VLLM, Machine, Tokens

from coldstart.system.ipc.addresses import find_free_port
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights
from coldstart.weights.load import stage
from coldstart.weights.prefetch import client

pytestmark = pytest.mark.vllm
FILE = "model.safetensors"
# Slow enough that the loader always waits.
SLOW = 200e3
FP32 = (*VLLM, "--dtype", "float32", *TRACED)


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
    for place in (machine.root / "run", machine.root / "run-1"):
        with suppress(client.PrefetchError):
            client.request("stop", directory=place / "coldstart")


def test_weights_from_http_answer_vllms_tokens(
    machine: Machine, bare: Path, model: Path, reference: Tokens, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    with run_server(model) as source:
        arguments = (
            "--mode",
            "fresh",
            "--weights-from",
            source.url,
            "--timeline",
            str(trace),
            "--progress",
            "json",
        )
        with machine.serving(str(bare), *arguments) as served:
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
    assert fetched["ts"] < spans["import vllm"]["ts"] + spans["import vllm"]["dur"]


@pytest.mark.nightly  # test_e2e_fleet_fetch.py shows the fetches of two ranks
def test_two_nodes_fetch_their_own_layers(machine: Machine, bare: Path, model: Path) -> None:
    plan = weights.build_plan(model)
    names = [tensor.name for tensor in checkpoint.list_tensors(plan)]
    config = json.loads((model / "config.json").read_text())
    own = [_bytes(plan, stage.select_tensor_names(names, config, [rank], 2)) for rank in (0, 1)]
    with run_server(model) as first, run_server(model) as second:
        pipelined = _two_nodes(machine, bare, first, second)
        assert pipelined["loads"] == [pytest.approx(size, rel=0.02) for size in own]
        assert second.total(FILE) == pytest.approx(own[1], rel=0.02)
        assert first.total(FILE) == pytest.approx(own[0], rel=0.02) and first.repeated(FILE) == 0
        first.reset()
        alone = ("--on-miss", "warn", "--mode", "fresh", "--weights-from", first.url)
        with machine.serving(str(bare), *alone, vllm=FP32) as served:
            (load,) = served.report["loads"]
            assert load["way"] == "prefetcher"
            assert served.tokens() == pipelined["tokens"]
        # The layers of the first rank were there.
        assert first.total(FILE) < _bytes(plan, names)


def _two_nodes(machine: Machine, bare: Path, first: RangeServer, second: RangeServer) -> dict[str, Any]:
    """Serve pipeline ranks 0 and 1 as two nodes with one prefetcher each."""
    here = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    place = machine.root / "run-1"
    place.mkdir(mode=0o700, exist_ok=True)
    group = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
    group = (*FP32, *group, "--master-port", str(find_free_port()))
    nodes = [Machine(machine.root, here), Machine(machine.root, here | {"XDG_RUNTIME_DIR": str(place)})]
    common = ("--on-miss", "warn", "--mode", "fresh", "--weights-from")
    headless = (*group, "--node-rank", "1", "--headless")
    with (
        nodes[1].serving(str(bare), *common, second.url, vllm=headless),
        nodes[0].serving(str(bare), *common, first.url, vllm=(*group, "--node-rank", "0")) as served,
    ):
        tokens = served.tokens()
        loads = [load["bytes"] for load in served.report["loads"]]
        fetched = [load["fetch"]["fetched_bytes"] for load in served.report["loads"]]
        assert loads == fetched
    return {"tokens": tokens, "loads": loads}


def _bytes(plan: dict[str, Any], names: list[str]) -> int:
    return sum(tensor.size for tensor in checkpoint.select_tensors(checkpoint.list_tensors(plan), names))
