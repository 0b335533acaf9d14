"""Two ranks of real vLLM become one worker on the machine of the first: the weights are there once, and a stream goes on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from tools.bursts import LOCAL, begin_stream, finish_stream, post
from tools.machine import TRACED, Machine, Served
from tools.memory import measure_private_bytes, run_beside, watch_memory

from coldstart.contract import handover
from coldstart.contract.handover import Pull
from coldstart.host.live.continuation import COMPLETIONS, Continuation
from coldstart.models import tiny
from coldstart.system.ipc.addresses import find_free_port
from coldstart.vllm.handover import handover_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

MOST = 1.15
"""Largest memory while the full worker starts, in sizes of the weights and the KV cache."""
KV_BYTES, MOVED_AFTER, TOKENS = 64 << 20, 20, 200
VLLM = ("--dtype", "bfloat16", "--max-model-len", "512", "--block-size", "32", *TRACED)
KEYS = {"rank": "5" * 64, "worker": "7" * 64}


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
            env = {**LOCAL, **place, "COLDSTART_HANDOVER_KEY": KEYS["rank"]}
            flags = [
                *VLLM,
                *handover_arguments("127.0.0.1", "llama"),
                *words,
                "--node-rank",
                str(rank),
                *more,
            ]
            node = Machine(machine.root, env)
            return stack.enter_context(node.serving(str(checkpoint), "--on-miss", "warn", vllm=flags))

        last = begin(1, "--headless")
        yield begin(0), last


@contextmanager
def _full_worker(machine: Machine, checkpoint: Path, **extra: str) -> Iterator[Served]:
    env = {**LOCAL, "COLDSTART_HANDOVER_KEY": KEYS["worker"], **extra}
    words = ["--kv-cache-memory-bytes", str(KV_BYTES), *handover_arguments("127.0.0.1", "llama")]
    with Machine(machine.root, env).serving(
        str(checkpoint), "--on-miss", "warn", vllm=[*VLLM, *words]
    ) as served:
        yield served


def _stream(source: Served, model: Path, request: str) -> tuple[Continuation, Any]:
    return begin_stream(source, model.name, list(range(100, 200)), request, TOKENS, MOVED_AFTER)


def _move(stream: Continuation, request: str, first: Served, full: Served) -> list[int]:
    """Continue the stream at the full worker with its KV."""
    held = json.loads(post(first, stream.build_pin_request(request, KEYS["rank"])).read())[handover.PARAMETER]
    pull = handover.verify_and_decode(KEYS["rank"], held)
    assert isinstance(pull, Pull) and len(pull.ranks) == 2
    stream.kv = handover.sign(KEYS["worker"], pull)
    return finish_stream(stream, post(full, stream.build_next_request(COMPLETIONS)[1]))


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
            worker.tokens()
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
            stays = finish_stream(*_stream(first, checkpoint, secrets.token_hex(8)))
            request = secrets.token_hex(8)
            stream, response = _stream(first, checkpoint, request)
            moved = _move(stream, request, first, worker)
            response.close()
            assert moved == stays
        assert answers and all(answer == expected for answer in answers)
    assert held_twice - shared > 0.8 * (weights // 2), figures
    assert factor <= MOST, figures
