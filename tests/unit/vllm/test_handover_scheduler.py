"""Blocks that the handover connector retains and loads, on vLLM's own manager of KV blocks, without a model."""

from typing import Any

import pytest

from coldstart.contract import handover
from coldstart.contract.handover import LoadQuery, LoadResult, Message, Pin, Pull

pytestmark = pytest.mark.vllm

KEY, SHAPE, PORTS = "3" * 64, "layout", (("127.0.0.1", 7000),)
BLOCK_TOKENS, BLOCKS, TOKENS = 4, 40, [*range(1, 11)]
FREE = BLOCKS - 1
"""vLLM retains one block as its null block."""


class Engine:
    """A scheduler of the connector beside vLLM's block manager, whose requests are computed by a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from coldstart.vllm.handover import connector

        self.now = 100.0
        monkeypatch.setattr(connector.time, "monotonic", lambda: self.now)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 128, BLOCK_TOKENS, BLOCK_TOKENS)
        self.connector = connector.HandoverScheduler(KEY, SHAPE, BLOCK_TOKENS, movable=True)
        self.connector.manager, self.connector.ports = self.manager, PORTS
        self.vllms_connector = connector.KvHandoverConnector.__new__(connector.KvHandoverConnector)
        self.vllms_connector._scheduler = self.connector
        self.lease_s, self.most = connector.LEASE_S, connector.MAX_PINS

    @property
    def free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def add(self, name: str, tokens: list[int], message: Message | None = None, key: str = KEY) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        made = Request(
            f"cmpl-{name}-0-1", tokens, SamplingParams(max_tokens=20), None, block_hasher=self.hasher
        )
        made.kv_transfer_params = None if message is None else handover.sign(key, message)
        self.connector.add_request(made)
        return made

    def compute(self, request: Any, count: int) -> None:
        assert self.manager.allocate_slots(request, count) is not None
        request.num_computed_tokens += count

    def ask(self, message: Message, key: str = KEY) -> Message | None:
        _, given = self.vllms_connector.request_finished(self.add("asks", [1], message, key), [1])
        return None if given is None else handover.verify_and_decode(KEY, given)

    def end(self, request: Any) -> None:
        """End a request as vLLM's scheduler does: it frees the blocks unless the connector delays that."""
        if not self.vllms_connector.request_finished_all_groups(request, ())[0]:
            self.manager.free(request)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def pin(name: str = "a", *, at_end: bool = False, tokens: list[int] = TOKENS) -> Pin:
    return Pin(name, len(tokens), handover.digest_tokens(tokens), at_end)


def test_retained_blocks_outlive_their_request_until_the_lease_ends(engine: Engine) -> None:
    request = engine.add("a", TOKENS)
    engine.compute(request, 10)
    pull = engine.ask(pin())
    assert isinstance(pull, Pull) and (pull.tokens, pull.shape, pull.ranks) == (10, SHAPE, PORTS)
    (held,) = engine.connector.build_metadata().pinned.values()
    assert (held.secret, len(held.blocks)) == (pull.secret, 3)
    engine.end(request)
    assert engine.free == FREE - 3
    engine.now += engine.lease_s - 1
    assert not engine.connector.build_metadata().ended_pins and engine.free == FREE - 3
    engine.now += 2
    assert engine.connector.build_metadata().ended_pins == {pull.pin} and engine.free == FREE


@pytest.mark.parametrize("late", [False, True])
def test_blocks_made_after_the_pin_are_retained_when_the_request_ends(engine: Engine, late: bool) -> None:
    request = engine.add("a", TOKENS)
    engine.compute(request, 10)
    pull = engine.ask(pin(at_end=True))
    assert isinstance(pull, Pull) and pull.tokens == 30, "all tokens that the request may get"
    assert not engine.connector.build_metadata().pinned
    request.append_output_token_ids([*range(11, 21)])
    engine.compute(request, 9)
    engine.now += 2 * engine.lease_s * late
    engine.connector.build_metadata()
    engine.end(request)
    retained = engine.connector.build_metadata().pinned
    assert [(name, len(held.blocks)) for name, held in retained.items()] == [(pull.pin, 5)][late:]
    assert engine.free == FREE - 5 * (not late)


@pytest.mark.parametrize("fault", ["digest", "unknown", "key", "no KV", "loading", "preempted", "ports"])
def test_what_the_request_does_not_have_is_not_retained(engine: Engine, fault: str) -> None:
    loaded = Pull("pin", "s", 10, SHAPE, PORTS) if fault == "loading" else None
    request = engine.add("a", TOKENS, loaded)
    if fault != "no KV":
        engine.compute(request, 10)
    engine.connector.plan_load(request, engine.manager.get_blocks(request.request_id), 9)
    if fault == "preempted":
        engine.manager.free(request)
    if fault == "ports":
        engine.connector.ports = ()
    asked = {"digest": pin(tokens=TOKENS[::-1]), "unknown": pin("b")}.get(fault, pin())
    before = engine.free
    assert engine.ask(asked, "guessed" if fault == "key" else KEY) is None
    assert engine.free == before and not engine.connector.build_metadata().pinned


def test_retained_requests_are_limited(engine: Engine) -> None:
    engine.compute(engine.add("a", TOKENS), 10)
    pulls = [engine.ask(pin(at_end=number == 0)) for number in range(engine.most + 1)]
    assert [pull is not None for pull in pulls] == [True] * engine.most + [False]


@pytest.mark.parametrize("invalid", [False, True])
def test_target_loads_what_its_prefix_cache_lacks_but_not_the_last_token(
    engine: Engine, invalid: bool
) -> None:
    first = engine.add("first", TOKENS)
    engine.compute(first, 10)
    pull = Pull("pin", "s", 30, SHAPE, PORTS)
    request = engine.add("a", [*TOKENS, *range(11, 22)], pull)
    cached, known, *_ = engine.manager.get_computed_blocks(request)
    assert known == 8, "the full blocks of the first request"
    count = engine.connector.count_loadable_tokens(request, known)
    assert count == 12, "the 21st token is computed"
    assert engine.manager.allocate_slots(request, 0, known, cached, num_external_computed_tokens=count)
    engine.connector.plan_load(request, engine.manager.get_blocks(request.request_id), count)
    (load,) = engine.connector.build_metadata().loads
    own = engine.manager.get_block_ids(request.request_id)[0]
    assert (load.skip_blocks, list(load.blocks)) == (2, own[2:5])
    assert engine.ask(LoadQuery("pin")) == LoadResult(False), "not yet"
    # A rank may report the block before another rank has finished.
    engine.connector.record_results((), {own[4]} if invalid else {own[0]})
    engine.connector.record_results((request.request_id,), ())
    assert engine.ask(LoadQuery("pin")) == LoadResult(not invalid)


def test_kv_of_other_weights_is_not_loaded(engine: Engine) -> None:
    request = engine.add("a", TOKENS, Pull("pin", "s", 10, "other", PORTS))
    assert engine.connector.count_loadable_tokens(request, 0) == 0


@pytest.mark.parametrize("skips", [False, True])
def test_kv_that_the_prefix_cache_has_counts_as_loaded_if_it_is_read(engine: Engine, skips: bool) -> None:
    engine.compute(engine.add("first", TOKENS), 10)
    request = engine.add("a", TOKENS[:9], Pull("pin", "s", 9, SHAPE, PORTS))
    cached, known, *_ = engine.manager.get_computed_blocks(request)
    assert (known, engine.connector.count_loadable_tokens(request, known)) == (8, 0)
    request.skip_reading_prefix_cache = skips
    engine.connector.plan_load(request, cached, 0)
    assert engine.ask(LoadQuery("pin")) == LoadResult(not skips)
    assert not engine.connector.build_metadata().loads
