"""Two ranks of real vLLM become one worker on the machine of the first, whose weights are there once.

test_e2e_kv_handover.py moves the streams of two ranks to one worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from tools.bursts import LOCAL
from tools.machine import Machine, Served
from tools.memory import measure_private_bytes, run_beside, watch_memory

from coldstart.models import tiny
from coldstart.system.ipc.addresses import find_free_port

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

MOST = 1.15
"""Largest memory while the full worker starts, in sizes of the weights and the KV cache."""
KV_BYTES = 64 << 20
VLLM = ("--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager")


@pytest.fixture(scope="module")
def checkpoint(machine: Machine) -> Path:
    """A Llama with random weights of 540 MB, which exceed what vLLM's processes need besides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, dtype=torch.bfloat16,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place := machine.root / "llama")
    tiny.make_tokenizer().save_pretrained(place)
    return place


@contextmanager
def _pipeline(machine: Machine, checkpoint: Path) -> Iterator[tuple[Served, Served]]:
    """Start two ranks as two servers; the second answers no requests."""
    words = ["--pipeline-parallel-size", "2", "--kv-cache-memory-bytes", str(KV_BYTES // 2), "--nnodes", "2"]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(find_free_port("127.0.0.1"))]
    with ExitStack() as stack:

        def begin(rank: int, *more: str) -> Served:
            place = {"COLDSTART_WEIGHTS_SOCKET": str(machine.root / f"rank-{rank}")}
            flags = [*VLLM, *words, "--node-rank", str(rank), *more]
            node = Machine(machine.root, {**LOCAL, **place})
            return stack.enter_context(node.serving(str(checkpoint), "--on-miss", "warn", vllm=flags))

        last = begin(1, "--headless")
        yield begin(0), last


@contextmanager
def _full_worker(machine: Machine, checkpoint: Path, **extra: str) -> Iterator[Served]:
    node, flags = Machine(machine.root, {**LOCAL, **extra}), [*VLLM, "--kv-cache-memory-bytes", str(KV_BYTES)]
    with node.serving(str(checkpoint), "--on-miss", "warn", vllm=flags) as served:
        yield served


@contextmanager
def _answering(ask: Callable[[], Any]) -> Iterator[list[Any]]:
    """Ask again and again in the background; the answers are in the list."""
    answers = list[Any]()

    def run(end: Event) -> None:
        while not end.is_set():
            answers.append(ask())

    with run_beside(run):
        yield answers


def test_two_ranks_become_one_worker_with_the_weights_held_once(
    machine: Machine, checkpoint: Path, record_property: Callable[[str, object], None]
) -> None:
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    with _pipeline(machine, checkpoint) as (first, last):
        expected = first.tokens()
        others = {process.pid for process in last.family()}

        def find_pids() -> set[int]:
            return {process.pid for process in psutil.Process().children(recursive=True)} - others

        with watch_memory(find_pids) as apart, _full_worker(machine, checkpoint) as control:
            control.tokens()
            held_twice = measure_private_bytes(find_pids())
        with watch_memory(find_pids) as together, ExitStack() as stack:
            place = {"COLDSTART_WEIGHTS_SOCKET": str(machine.root / "rank-0")}
            with _answering(first.tokens) as answers:
                worker = stack.enter_context(_full_worker(machine, checkpoint, **place))
            assert worker.tokens() == expected
            shared = measure_private_bytes(find_pids())
            assert not [one for one in worker.report["fallbacks"] if one["section"] == "sharing"]
            # The second half of the layers belongs to the other rank.
            runtime = held_twice - weights - weights // 2
            peak, peak_apart = (max(held for _, held in each) for each in (together, apart))
            factor = (peak - runtime) / (weights + KV_BYTES)
            figures = {"weights": weights, "kv": KV_BYTES, "runtime": runtime, "steady": shared}
            figures |= {"steady_apart": held_twice}
            figures |= {"peak": peak, "peak_apart": peak_apart, "factor": round(factor, 3)}
            record_property("memory", json.dumps(figures))
            print(json.dumps(figures))
        assert answers and all(answer == expected for answer in answers)
    assert held_twice - shared > 0.8 * (weights // 2), figures
    assert factor <= MOST, figures
