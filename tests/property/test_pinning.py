"""The host cache drops what no live request needs first, and evicted requests' chunks last."""

from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from coldstart.vllm.scheduling.pinning import PinnedLru


def stored(policy: PinnedLru, request_id: str, *keys: bytes) -> ReqContext:
    context = ReqContext(request_id)
    policy.on_store_miss(keys, context)
    for number, key in enumerate(keys):
        chunk = ChunkStatus(number)
        policy.insert(key, chunk)
        chunk.ref_cnt = 0
        policy.mark_evictable(key)
    return context


def order(policy: PinnedLru, count: int) -> list[bytes]:
    return [policy.evict(1, set())[0][0] for _ in range(count)]


def test_eviction_order_is_finished_then_running_then_evicted() -> None:
    policy = PinnedLru(8)
    stored(policy, "away", b"a")
    stored(policy, "runs", b"r")
    gone = stored(policy, "gone", b"g")
    policy.record_eviction("away")
    policy.on_request_finished(((b"g",),), set(), set(), gone)
    assert order(policy, 3) == [b"g", b"r", b"a"]


def test_shared_chunk_is_retained_for_the_evicted_request() -> None:
    policy = PinnedLru(8)
    first = stored(policy, "first", b"s")
    stored(policy, "other", b"o")
    policy.touch([b"s"], ReqContext("second"))
    policy.record_eviction("second")
    policy.on_request_finished(((b"s",),), set(), set(), first)
    assert order(policy, 2) == [b"o", b"s"]


def test_chunks_of_a_returned_request_are_evicted_by_age() -> None:
    policy = PinnedLru(8)
    stored(policy, "one", b"1")
    stored(policy, "two", b"2")
    policy.record_eviction("one")
    policy.back("one")
    assert order(policy, 2) == [b"1", b"2"] and policy.evict(1, set()) is None
    policy.clear()
    assert not policy.chunks
