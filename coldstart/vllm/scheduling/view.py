"""Read-only view of vLLM's scheduler for placement: the state of each request's KV, the block pool, and the slots.

Invariants: every value is vLLM's own state at the time of the call. Blocks that a running copy will free count as free. A
request is ready if and only if vLLM's next schedule() can give it tokens, provided that memory suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling.job import Job

WAITING, RUNNING, PREEMPTED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS

Enst = Callable[[Request], float]


class KvState(Enum):
    """KV state of a request.

    NEW: never computed. HOST: preempted, and its KV is on the host or was dropped. LOADING, LOADED: an asynchronous load
    is running or has finished. OTHER: it has a slot, or waits for a grammar, for more input, or for tokens in flight.
    """

    NEW = "new"
    HOST = "host"
    LOADING = "loading"
    LOADED = "loaded"
    OTHER = "other"


class EngineView:
    """View of the KV memory of one vLLM scheduler. Only `evict`, which removes a request from the GPU, changes that memory.

    `capacity` is the number of blocks in the pool, and `watermark` the number that an admission must leave free. A
    request has blocks in each of `groups` KV cache groups. With `speculates`, the number of tokens in the next step is
    uncertain.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.batch, self.evict = engine, engine.batch, engine._evict
        self._stages: int = engine.stages
        self._in_flight: Callable[[Request], bool] = engine.is_in_flight
        self._manager = engine.kv_cache_manager
        self.token_budget: int = engine.max_num_scheduled_tokens
        self.capacity: int = self._manager.block_pool.num_gpu_blocks - 1
        self.watermark: int = self._manager.watermark_blocks
        specs = [group.kv_cache_spec for group in engine.kv_cache_config.kv_cache_groups]
        self.groups = len(specs)
        self.speculates = bool(engine.num_spec_tokens)
        self.block_tokens: int = engine.block_size
        is_simple = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
        self._has_simple_layout = is_simple and not self.speculates
        # These are called at least once per request in a batch, so avoid a wrapper function.
        self.request: Callable[[str], Request] = engine.requests.__getitem__
        self.free_blocks: Callable[[], int] = self._manager.block_pool.get_num_free_blocks

    # --- requests ---

    def is_ready(self, job: Job) -> bool:
        """Return whether the request can run if it is picked. KV that is on the host must be loaded first."""
        request = self.request(job.id)
        if request.status is RUNNING:
            if request.num_output_placeholders and is_last_token_in_flight(request):
                return False
            return self._stages == 1 or not self._in_flight(request)
        if self._engine.pause_state is PauseState.PAUSED_NEW and request not in self._engine.picked_holding:
            return False
        if request.status is WAITING and not (request.num_computed_tokens or request.num_stale_output_tokens):
            return True  # fast path for bursts; equivalent to the code below
        state = self.get_kv_state(request)
        if state is KvState.HOST:
            connector = self._engine.connector
            return connector is None or bool(connector.find_hit(request, self._manager) == 0)
        return state is KvState.NEW or state is KvState.LOADED

    def get_kv_state(self, request: Request) -> KvState:
        """Return the KV state of a request."""
        status = request.status
        if status is LOADING:
            has_landed = request.request_id in self._engine.finished_recving_kv_req_ids
            return KvState.LOADED if has_landed else KvState.LOADING
        if status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            structured = request.structured_output_request
            return KvState.NEW if structured is not None and structured.grammar is not None else KvState.OTHER
        # Output that was sampled before a preemption may not be delivered yet: resuming now could sample it again.
        drains = request.num_stale_output_tokens and not request.drop_stale_output
        if drains or status in (RUNNING, RequestStatus.WAITING_FOR_STREAMING_REQ):
            return KvState.OTHER
        if request.num_computed_tokens > 0:
            return KvState.LOADED
        return KvState.HOST if status is PREEMPTED else KvState.NEW

    def can_proceed(self, request: Request) -> bool:
        """Return whether the request runs, and its next step needs no token that a step in flight still computes."""
        runs = request.status is RUNNING
        return runs and not is_last_token_in_flight(request) and not self._in_flight(request)

    def list_not_in_flight(self, jobs: Iterable[Job]) -> Iterable[Job]:
        """Return the jobs that are not in a batch in flight. Jobs in flight can be neither served nor evicted."""
        return (
            jobs if self._stages == 1 else (job for job in jobs if not self._in_flight(self.request(job.id)))
        )

    def limit_adapters(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests, but none whose LoRA adapter exceeds vLLM's limit of adapters in one batch."""
        config = self._engine.lora_config
        if config is None:
            yield from requests
            return
        used: set[int | None] = {None}
        for request in requests:
            adapter = request.lora_request.lora_int_id if request.lora_request else None
            if adapter in used or len(used) <= config.max_loras:
                used.add(adapter)
                yield request

    def has_evicted_requests(self) -> bool:
        """Return whether any evicted request has not resumed yet."""
        return bool(self._engine.connector.evicted) or bool(self._engine.picked_holding)

    def find_request_on_host(self, name: str) -> Request | None:
        """Return the request if it is evicted, its KV is on the host, and its load has not started; otherwise, None."""
        connector = self._engine.connector
        request: Request | None = connector.evicted.get(name)
        if request is None or connector.hits.get(name) == 0 or self.get_kv_state(request) is not KvState.HOST:
            return None
        return request if connector.find_hit(request, self._manager) else None

    def list_evictable(self) -> Iterator[Request]:
        """Return the requests that have a slot and whose blocks no step in flight writes."""
        freeable, in_flight = self._engine._request_blocks_can_be_freed, self._in_flight
        # vLLM loses a session that is evicted while a token of it is in flight, if this token ends its turn.
        started = (r for r in self._engine.started if not (r.resumable and r.num_output_placeholders))
        return (r for r in started if freeable(r) and not in_flight(r))

    # --- blocks, slots and tokens ---

    def count_needed_blocks(self, request: Request) -> int:
        """Return the number of additional blocks that the request needs for all of its tokens and the next one.

        It is at most the number of blocks in the pool that the request does not have, so that a request can fill the pool.
        """
        if request.status is RUNNING and self.groups == 1 and not self.speculates:
            # vLLM's number omits the next token, and one more block for each request would leave half of a small pool idle.
            wanted = -(-count_tokens_after_flight(request) // self.block_tokens)
            needed = max(0, wanted - self.count_blocks(request))
        elif (
            request.num_computed_tokens or request.status in (RUNNING, LOADING) or not self._has_simple_layout
        ):
            needed = int(self._engine._request_remaining_blocks(request)) + self.groups
        else:
            # Equal to vLLM's number in a tenth of the time: the request has no blocks, and the prefix cache does not count.
            needed = -(-int(request.num_tokens) // self.block_tokens) + 1
        needed += self.watermark * (request.status is not RUNNING)
        if needed <= self.free_blocks():
            return needed
        blocks = chain.from_iterable(self._manager.get_blocks(request.request_id).blocks)
        return min(needed, self.capacity - sum(not block.is_null for block in blocks))

    def compute_max_blocks(self, request: Request) -> int:
        """Return an upper bound of the number of blocks that the request has when its next token is computed."""
        return self.groups * (int(request.num_tokens) // self.block_tokens + 2)

    def count_blocks(self, request: Request) -> int:
        """Return the number of blocks that the request has, including shared blocks."""
        blocks = self._manager.get_blocks(request.request_id).blocks
        return len(blocks[0]) if self.groups == 1 else sum(map(len, blocks))

    def iterate_freed_blocks(self, order: Sequence[Request]) -> Iterator[int]:
        """Yield, for each request in `order`, how many blocks its eviction frees. A shared block counts for its last holder."""
        holders: dict[int, int] = {}
        for request in order:
            freed = 0
            for block in chain.from_iterable(self._manager.get_blocks(request.request_id).blocks):
                left = holders.get(block.block_id, block.ref_cnt) - 1
                holders[block.block_id] = left
                freed += left == 0 and not block.is_null
            yield freed

    def count_reserved_blocks(self) -> int:
        """Return the number of blocks that running prefills still need, which vLLM does not use for loads."""
        return int(self._engine._inflight_prefill_reserved_blocks())

    def count_free_slots(self) -> int:
        """Return the number of free slots in the model runner."""
        taken = len(self._engine.started) + self._engine.num_waiting_for_streaming_input
        return int(self._engine.max_num_running_reqs - taken)

    def list_prefilling(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests whose prompt is not fully computed: they are not running, or are in a chunked prefill."""
        return [r for r in requests if r.status is not RUNNING or r.is_prefill_chunk]

    def count_chunk_tokens(self, request: Request, limit: int) -> int:
        """Return the number of tokens that the next step computes if it computes at most `limit` tokens of one request."""
        tokens = count_unscheduled_tokens(request)
        if request.status is not RUNNING and not request.num_computed_tokens:
            # Tokens in the prefix cache are not computed again.
            tokens -= self._manager.get_computed_blocks(request)[1]
        return min(tokens, limit)

    def compute_chunk_limit(self, running: int) -> int:
        """Return vLLM's limit of tokens of one request in a step, `running` of whose requests run already."""
        config = self._engine.scheduler_config
        limit = int(config.long_prefill_token_threshold)
        if limit and getattr(self._engine, "adaptive_long_prefill_threshold", False):
            eligible = running + self._engine.get_request_counts()[1]
            limit = max(limit, config.max_num_batched_tokens // eligible)
        return limit or self.token_budget


def is_last_token_in_flight(request: Request) -> bool:
    """Return whether the steps in flight already reach max_tokens, so that vLLM will not schedule another step."""
    pending: int = request.num_output_placeholders
    certain: int = request.num_computed_tokens + 2 - pending
    return pending > 0 and certain >= request.num_prompt_tokens + request.max_tokens


def count_safe_steps(request: Request) -> int:
    """Return a number of decode steps, including the next, for which `is_last_token_in_flight` is certainly False."""
    return int(request.num_prompt_tokens + request.max_tokens - 1 - request.num_computed_tokens)


def count_unscheduled_tokens(request: Request) -> int:
    """Return the number of the request's tokens, including placeholders, that are not scheduled yet."""
    return int(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens)


def count_tokens_after_flight(request: Request) -> int:
    """Return the number of tokens that the request has after every step in flight has returned."""
    return int(max(request.num_tokens + request.num_output_placeholders, request.num_computed_tokens + 1))
