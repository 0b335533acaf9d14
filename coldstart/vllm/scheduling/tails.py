"""vLLM's offloading connector, which also keeps the last block of an evicted request.

The last block is not full, so it has no hash. It is copied to the host in the step that evicts the request, under a key for
this eviction only, since it is not a shareable prefix. The worker submits a store that must be flushed, and waits for it before
the step computes anything, so the copy has the content after the latest step.

Invariants: a key names one content for the life of the engine. Only tokens that the scheduler knows and that a step has
computed (or computes now) are kept. A tail is loaded only directly after full blocks that are present, or else recomputed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, OffloadKey, make_offload_key
from vllm.v1.request import Request, RequestStatus


class TailsConnector(OffloadingConnector):
    """Drop-in replacement; equal to vLLM's connector if tails cannot be kept (see `keepable`)."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        scheduler = self.connector_scheduler
        self.tails = Tails(scheduler) if scheduler and keepable(vllm_config, scheduler.config) else None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.tails is not None and self.tails.leaves(request):
            return None, False  # this step issues the store
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self.tails is not None and num_external_tokens:
            self.tails.release(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        if self.tails is None:
            return super().build_connector_meta(scheduler_output)
        self.tails.note_step(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        self.tails.store(meta)
        return meta

    def reset_cache(self) -> bool | None:
        if self.tails is not None:
            self.tails.clear()
        answer: bool | None = super().reset_cache()
        return answer


def keepable(vllm_config: Any, config: Any) -> bool:
    """Return whether all KV groups end at the same token, and no step discards computed tokens (as speculation does)."""
    events = vllm_config.kv_events_config
    return (
        vllm_config.speculative_config is None
        and not (events is not None and events.enable_kv_cache_events)
        and config.blocks_per_chunk == config.dcp_world_size == 1
        and len({group.tokens_per_block for group in config.kv_group_configs}) == 1
        and all(group.sliding_window_size_in_chunks is None for group in config.kv_group_configs)
    )


class Tails:
    """Tails of one vLLM OffloadingConnectorScheduler, whose look-up and boundary keys are replaced.

    `_computed` is the number of tokens in device memory after the latest step, by request. `_kept` has for each evicted request
    the token position at the end of its tail, the count of its evictions, and a unique number.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._block: int = scheduler.config.kv_group_configs[0].tokens_per_block
        self._groups = len(scheduler.config.kv_group_configs)
        self._computed: dict[str, int] = {}
        self._leaving: dict[str, tuple[int, list[int]]] = {}
        self._kept: dict[str, tuple[int, int, int]] = {}
        self._numbers = 0
        self._whole = scheduler._lookup
        scheduler._lookup = self._found
        scheduler._make_boundary_key = self._key

    def leaves(self, request: Request) -> bool:
        """Return whether the request was evicted and its tail is about to be stored. Call it before vLLM frees its blocks."""
        name = request.request_id
        if name in self._leaving:
            return True
        if request.status != RequestStatus.PREEMPTED or name not in self._computed:
            return False
        status = self._scheduler._req_status[name]
        tokens = self._scheduler._calc_num_offloadable_tokens(status, self._computed.pop(name))
        place = (tokens - 1) // self._block
        if tokens <= 0 or any(len(group.block_ids) <= place for group in status.group_states):
            return False
        if all(group.next_stored_chunk_idx > place for group in status.group_states):
            return False  # full, and already being stored
        self._leaving[name] = tokens, [group.block_ids[place] for group in status.group_states]
        return True

    def note_step(self, output: SchedulerOutput) -> None:
        """Record the evicted requests of a decided step, and the computed tokens of the others after it."""
        requests = self._scheduler._req_status
        for name in output.preempted_req_ids or ():
            if name in requests:
                self.leaves(requests[name].req)
        for name in output.finished_req_ids or ():
            self._computed.pop(name, None)
            self._kept.pop(name, None)
        for name, tokens in output.num_scheduled_tokens.items():
            self._computed[name] = requests[name].req.num_computed_tokens + tokens

    def store(self, meta: Any) -> None:
        """Add one transfer to `meta` for each request that this step evicts: its last block, from the device to the host."""
        scheduler = self._scheduler
        for name, (tokens, blocks) in self._leaving.items():
            status = scheduler._req_status.get(name)
            if status is None or status.req.status != RequestStatus.PREEMPTED:
                continue
            self._numbers += 1
            kept = tokens, status.req.num_preemptions, self._numbers
            keys = self._keys(kept)
            made = scheduler.manager.prepare_store(keys, status.req_context)
            if made is None or len(made.keys_to_store) < len(keys):
                continue  # no room on the host
            scheduler.manager.touch(keys, status.req_context)
            self._kept[name] = kept
            job = scheduler._generate_job_id()
            status.transfer_jobs.add(job)
            scheduler._jobs[job] = TransferJobStatus(
                req_id=name, pending_count=scheduler.config.num_workers, keys=set(keys), is_store=True
            )
            place = (tokens - 1) // self._block
            source = GPULoadStoreSpec(
                blocks, group_sizes=[1] * self._groups, block_indices=[place] * self._groups
            )
            meta.store_jobs[job] = TransferJob(req_id=name, src_spec=source, dst_spec=made.store_spec)
            meta.jobs_to_flush.add(job)
        self._leaving.clear()

    def release(self, request: Request) -> None:
        """Forget a tail whose load was decided, so that the host can drop it; the block is stored again once it is full."""
        kept = self._kept.pop(request.request_id, None)
        if kept is None:
            return
        status = self._scheduler._req_status[request.request_id]
        for group in status.group_states:
            group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, kept[0] // self._block)
        disown = getattr(self._scheduler.manager._policy, "disown", None)
        if disown is not None:
            disown(request.request_id, self._keys(kept))

    def clear(self) -> None:
        self._computed.clear()
        self._leaving.clear()
        self._kept.clear()

    def _found(self, status: Any, most: int | None = None) -> int | None:
        """Look up as vLLM does, and add the tail if it begins where the hit ends."""
        found: int | None = self._whole(status, most)
        kept = self._kept.get(status.req.request_id)
        if found is None or kept is None or most is not None or status.max_load_tokens is not None:
            return found
        local, (tokens, eviction, _) = status.num_locally_computed_tokens, kept
        first = (tokens - 1) // self._block * self._block
        if (
            eviction != status.req.num_preemptions
            or not first <= local + found < tokens <= status.req.num_tokens
        ):
            return found
        manager, context = self._scheduler.manager, status.req_context
        if any(manager.lookup(key, context) is not LookupResult.HIT for key in self._keys(kept)):
            return found
        status.partial_tail_boundary = tokens
        missing: int = tokens - local
        return missing

    def _key(self, request: Request, group: int, boundary: int, context: Any) -> OffloadKey:
        key = self._keys(self._kept[request.request_id])[group]
        context.set_offload_key_position(key, boundary)
        return key

    def _keys(self, kept: tuple[int, int, int]) -> list[OffloadKey]:
        name = b"tail" + kept[2].to_bytes(8, "big")
        return [make_offload_key(name, group.group_idx) for group in self._scheduler.config.kv_group_configs]
