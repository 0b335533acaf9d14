"""Running requests move between real vLLM servers together with their KV, from a pipeline to one worker.

The reference is the same request on the source, which is not moved.
"""

import json
import re
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tools.bursts import LOCAL, begin_stream, finish_stream, open_client, post
from tools.machine import Machine, Served

from coldstart.contract import handover
from coldstart.contract.handover import Pull
from coldstart.host.live.continuation import COMPLETIONS, Continuation
from coldstart.vllm.handover import handover_arguments

# By day, unit/fleet/live/test_kv_transfer.py and test_moves.py show the protocol and its faults, without vLLM, and
# unit/vllm/test_handover_scheduler.py the blocks and rights to them, on the block manager of vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

KEYS = {"source": "5" * 64, "target": "7" * 64}
BLOCK_TOKENS, MOVED_AFTER, TOKENS = 32, 20, 500
"""A stream that moves must still run after the first copy of its KV, on a busy machine too."""
SMALL = ("--dtype", "bfloat16", "--max-model-len", "1024", "--block-size", str(BLOCK_TOKENS))
SMALL = (*SMALL, "--kv-cache-memory-bytes", str(1 << 26))


@dataclass(frozen=True)
class Pair:
    """A pipeline of two ranks, and a worker with the same weights."""

    source: Served
    target: Served
    nixl: bool

    def prompt(self, length: int) -> list[int]:
        return [10 + secrets.randbelow(1900) for _ in range(length)]

    def hold(self, stream: Continuation, request: str, *, at_end: bool = False) -> Pull | None:
        body = stream.build_pin_request(request, KEYS["source"], at_end=at_end)
        message = self._ask(self.source, "source", body)
        assert message is None or isinstance(message, Pull)
        return message

    def has_loaded(self, stream: Continuation, pull: Pull) -> bool:
        body = stream.build_message_request(KEYS["target"], handover.LoadQuery(pull.pin))
        message = self._ask(self.target, "target", body)
        assert isinstance(message, handover.LoadResult)
        return message.loaded

    def _ask(self, served: Served, name: str, body: bytes) -> handover.Message | None:
        given = json.loads(post(served, body).read())[handover.PARAMETER]
        return handover.verify_and_decode(KEYS[name], given)


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    nixl: bool = request.param == "nixl"
    if nixl:
        pytest.importorskip("nixl._api", reason="NIXL is not installed", exc_type=ImportError)

    def flags(name: str) -> tuple[Machine, list[str]]:
        extra = {**LOCAL, "COLDSTART_HANDOVER_KEY": KEYS[name]}
        if nixl:
            # This machine has no RDMA.
            extra |= {"COLDSTART_NIXL": "1", "UCX_TLS": "tcp"}
        return Machine(machine.root, extra), [*SMALL, *handover_arguments("127.0.0.1", "tiny")]

    at, words = flags("source")
    ranks = ("--pipeline-parallel-size", "2", "--enforce-eager")
    with at.serving("tiny-llama", "--on-miss", "warn", vllm=[*words, *ranks]) as source:
        at, words = flags("target")
        with at.serving("tiny-llama", "--on-miss", "warn", vllm=[*words, "--enforce-eager"]) as target:
            yield Pair(source, target, nixl)


def _begin(pair: Pair, prompt: list[int], request: str) -> tuple[Continuation, Any]:
    return begin_stream(pair.source, "tiny-llama", prompt, request, TOKENS, MOVED_AFTER)


def _loads(served: Served) -> int:
    """Return how often a rank of the server has loaded the KV of a request."""
    return served.log.read_text(errors="replace").count("loaded the KV of a request: ")


@pytest.mark.parametrize("length", [5, 100, 400])
def test_a_moved_request_has_the_tokens_of_one_that_stays(pair: Pair, length: int) -> None:
    prompt = pair.prompt(length)
    stays = finish_stream(*_begin(pair, prompt, secrets.token_hex(8)))
    request, loads = secrets.token_hex(8), _loads(pair.target)
    stream, response = _begin(pair, prompt, request)
    pull = pair.hold(stream, request)
    assert pull is not None and pull.tokens >= length and len(pull.ranks) == 2
    # The source continues meanwhile; then the tokens since are missing at the target. Their prefill in bf16 could differ.
    post(pair.target, stream.build_warmup_request(handover.sign(KEYS["target"], pull))).read()
    while len(stream.tokens) < MOVED_AFTER + 5:
        stream.filter_chunk(response.readline())
    pull = pair.hold(stream, request, at_end=True)
    assert pull is not None
    while len(stream.tokens) < MOVED_AFTER + 2 * BLOCK_TOKENS:
        stream.filter_chunk(response.readline())
    response.close()
    assert _continue(pair, stream, handover.sign(KEYS["target"], pull)) == stays
    assert _loads(pair.target) == loads + 2 and pair.has_loaded(stream, pull)
    log = pair.target.log.read_text(errors="replace")
    assert bool(re.search(r"NIXL so far: [1-9]\d* layers, 0 failures", log)) == pair.nixl


def _continue(pair: Pair, stream: Continuation, kv: dict[str, str]) -> list[int]:
    """Continue the stream at the target."""
    stream.kv = kv
    return finish_stream(stream, post(pair.target, stream.build_next_request(COMPLETIONS)[1]))


@pytest.fixture(scope="module")
def stayed(pair: Pair) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens of a request with it that is not moved."""
    prompt = pair.prompt(100)
    return prompt, finish_stream(*_begin(pair, prompt, secrets.token_hex(8)))


@pytest.mark.parametrize("fault", ["unreachable", "signature", "identity", "lease"])
def test_lost_kv_is_computed(pair: Pair, stayed: tuple[list[int], list[int]], fault: str) -> None:
    prompt, stays = stayed
    request, loads = secrets.token_hex(8), _loads(pair.target)
    stream, response = _begin(pair, prompt, request)
    pull = pair.hold(stream, request)
    assert pull is not None
    response.close()
    if fault == "identity":
        pull = replace(pull, shape="other weights")
    elif fault == "unreachable":
        pull = replace(pull, ranks=(pull.ranks[0], ("127.0.0.1", 1)))
    elif fault == "lease":
        pull = replace(pull, pin="0" * 32)
    key = KEYS["source" if fault == "signature" else "target"]
    made = _continue(pair, stream, handover.sign(key, pull))
    # A prefill in bf16 is not bitwise equal to the decoding of the same tokens.
    assert len(made) == TOKENS and made[:MOVED_AFTER] == stays[:MOVED_AFTER]
    assert _loads(pair.target) == loads and not pair.has_loaded(stream, pull)


def test_a_host_moves_a_stream_to_the_server_that_replaces_its_own(machine: Machine, tmp_path: Path) -> None:
    file, rows = tmp_path / "host.toml", machine.root / "host" / "log"

    def configure(batch: int) -> None:
        args = json.dumps([*SMALL, "--enforce-eager", "--max-num-seqs", str(batch)])
        settings = (
            'memory = "8GiB"\nresume_streams = true\non_miss = "warn"\n[models.tiny-llama]\nmemory = "1GiB"\n'
        )
        file.with_suffix(".new").write_text(f"{settings}args = {args}\n")
        file.with_suffix(".new").replace(file)

    configure(4)
    with machine.gateway("host", "--host-file", str(file)) as (process, url, _):
        client = open_client(url)

        def ask(tokens: int) -> Any:
            return client.completions.create(
                model="tiny-llama",
                prompt="a b c",
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )

        def read(stream: Any) -> list[int]:
            return [token for piece in stream for token in piece.choices[0].token_ids or ()]

        stays = read(ask(TOKENS))
        moving = ask(900)
        first = next(iter(moving)).choices[0].token_ids
        configure(8)
        process.send_signal(signal.SIGHUP)
        assert [*first, *read(moving)][:TOKENS] == stays
        events = [json.loads(line) for line in rows.read_text().splitlines() if line.startswith("{")]
        (moved,) = (one for one in events if one["event"] == "moved")
        assert moved["with_kv"] and 0 < moved["made"] < 900
        assert read(ask(TOKENS)) == stays
