"""vLLM's real scheduler and connector with a virtual clock, symbolic KV and a pure model.

A KV cell holds a digest of the prefix that was written there; a step that reads anything but exactly the
prefix it needs fails. The next token is a function of the prefix alone, so outputs can be predicted. Every rank of a
parallel engine has separate cells and copies; vLLM's aggregator combines their reports.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling.settings import KEY, SchedulerSettings
from coldstart.vllm.scheduling import virtual_engine
from coldstart.vllm.scheduling.virtual_engine import (
    EngineResources,
    UnreplicatedLayout,
    create_config,
    create_scheduler,
)

BLOCK, VOCABULARY = 4, 1000
POISON = -1


@dataclass(frozen=True)
class Shape:
    """One engine: its runner slots, batch cap, token budget, pools, and steps in flight; `stages` of a pipeline, each of
    `tensor` ranks. A pipeline has as many batches in flight as stages, or one more with asynchronous scheduling.
    """

    slots: int = 8
    batch: int = 3
    tokens: int = 32
    blocks: int = 40
    host_blocks: int | None = None
    depth: int = 2
    stages: int = 1
    tensor: int = 1
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor

    @property
    def asynchronous(self) -> bool:
        """Return whether vLLM reserves slots for tokens in flight."""
        return self.depth > self.stages


def build(shape: Shape, cls: type[AsyncScheduler]) -> AsyncScheduler:
    machine = EngineResources(
        max_running_requests=shape.slots,
        token_budget=shape.tokens,
        block_tokens=BLOCK,
        device_blocks=shape.blocks - 1,
        host_blocks=shape.host_blocks or 0,
    )
    settings = {"batch": shape.batch, **shape.settings}
    config = create_config(machine, SchedulerSettings.from_additional_config({KEY: settings}))
    config.scheduler_config.async_scheduling = shape.asynchronous
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = shape.tensor, shape.stages
    parallel.world_size = shape.ranks
    made = create_scheduler(cls, config)
    # With a pipeline vLLM schedules asynchronously on its second model runner only, which the CPU platform has not.
    made.use_v2_model_runner = shape.stages > 1 and shape.asynchronous
    return made


def make_request(name: str, prompt: list[int], output: int, priority: int = 0) -> Request:
    return virtual_engine.make_request(name, prompt, output, BLOCK, priority)


def expected(prompt: list[int], output: int) -> list[int]:
    """Return the next token: the digest of the prefix modulo the vocabulary."""
    held = Held.build(prompt, [])
    for _ in range(output):
        held.append(held.digests[-1] % VOCABULARY)
    return held.tokens[len(prompt) :]


class SymbolicWorker(OffloadingWorker):  # type: ignore[misc]
    """Worker whose copies end after a random number of steps; a load poisons its target at once, a store reads late."""

    def __init__(self, cells: list[list[int]], random: Random, slowest: int) -> None:
        self.cells, self.random, self.slowest = cells, random, slowest
        self.host: dict[int, list[int]] = {}
        self.jobs: dict[int, tuple[int, list[tuple[int, int]], bool]] = {}
        self.now = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, list(zip(src_spec.block_ids, dst_spec.block_ids, strict=True)), True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        pairs = list(zip(dst_spec.block_ids, src_spec.block_ids, strict=True))
        for block, _ in pairs:
            self.cells[block] = [POISON] * BLOCK
        return self._submit(job_id, pairs, False)

    def get_finished(self) -> list[TransferResult]:
        self.now += 1
        due = [job_id for job_id, (when, _, _) in self.jobs.items() if when <= self.now]
        return [self._land(job_id) for job_id in due]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if job_id in self.jobs:
                _, pairs, store = self.jobs[job_id]
                self._move(pairs, store)
                self.jobs[job_id] = (0, [], store)

    def _submit(self, job_id: int, pairs: list[tuple[int, int]], store: bool) -> bool:
        self.jobs[job_id] = (self.now + 1 + self.random.randrange(self.slowest), pairs, store)
        return True

    def _land(self, job_id: int) -> TransferResult:
        _, pairs, store = self.jobs.pop(job_id)
        self._move(pairs, store)
        return TransferResult(job_id, True, len(pairs), 0.0)

    def _move(self, pairs: list[tuple[int, int]], store: bool) -> None:
        for block, chunk in pairs:
            if store:
                self.host[chunk] = list(self.cells[block])
            else:
                self.cells[block] = list(self.host[chunk])


@dataclass
class Held:
    """A request on the worker; digests[i] is that of tokens[: i + 1]."""

    tokens: list[int]
    blocks: list[int]
    digests: list[int] = field(default_factory=list)

    @classmethod
    def build(cls, tokens: list[int], blocks: list[int]) -> Held:
        held = cls([], blocks)
        for token in tokens:
            held.append(token)
        return held

    def append(self, token: int) -> None:
        self.tokens.append(token)
        digest = self.digests[-1] if self.digests else 17
        self.digests.append((digest * 1000003 + token + 1) & 0xFFFFFFFFFFFF)


class Rank:
    """One worker with its cells, and copies to and from its host memory that end at random times."""

    def __init__(self, scheduler: AsyncScheduler, shape: Shape, random: Random) -> None:
        self.cells = [[POISON] * BLOCK for _ in range(shape.blocks)]
        self.held: dict[str, Held] = {}
        # Without asynchronous scheduling a pipeline's first stage receives tokens from the scheduler only.
        self.told = shape.stages > 1 and not shape.asynchronous
        self.worker: OffloadingConnectorWorker | None = None
        if scheduler.connector is not None:
            self.worker = OffloadingConnectorWorker(
                UnreplicatedLayout(), scheduler.vllm_config, scheduler.kv_cache_config
            )
            self.worker.worker = SymbolicWorker(self.cells, random, slowest=6)

    def execute(self, output: SchedulerOutput, meta: Any) -> ModelRunnerOutput:
        """Process `output`; `meta` is this rank's copy of the connector's part, which it changes."""
        if self.worker is not None:
            self.worker.handle_preemptions(meta)
        for name in output.finished_req_ids:
            self.held.pop(name, None)
        self._take_blocks(output)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(output.num_scheduled_tokens)
        sampled = [self._compute(name, starts[name], output.num_scheduled_tokens[name]) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._transfers(output, meta),
        )

    def delivered(self, name: str, tokens: list[int]) -> None:
        """Receive the sampled tokens of a batch."""
        if self.told and name in self.held:
            for token in tokens:
                self.held[name].append(token)

    def _take_blocks(self, output: SchedulerOutput) -> None:
        for copy in output.kv_cache_block_copies or ():
            self.cells[copy.dst_block_id] = list(self.cells[copy.src_block_id])
        for new in output.scheduled_new_reqs:
            tokens = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            self.held[new.req_id] = Held.build(list(tokens), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.held[name].blocks = list(blocks[0])
            elif blocks is not None:
                self.held[name].blocks += blocks[0]

    def _compute(self, name: str, start: int, count: int) -> list[int]:
        held = self.held[name]
        assert start + count <= len(held.tokens), "scheduled past the tokens that exist"
        for position in range(start):
            found = self.cells[held.blocks[position // BLOCK]][position % BLOCK]
            assert found == held.digests[position], f"{name} read a wrong KV cell at {position}"
        for position in range(start, start + count):
            self.cells[held.blocks[position // BLOCK]][position % BLOCK] = held.digests[position]
        if start + count < len(held.tokens):
            return []
        token = held.digests[-1] % VOCABULARY
        if not self.told:
            held.append(token)
        return [token]

    def _transfers(self, output: SchedulerOutput, meta: Any) -> KVConnectorOutput | None:
        if self.worker is None:
            return None
        self.worker.start_kv_transfers(meta)
        self.worker.prepare_store_kv(meta)
        sending, receiving = self.worker.get_finished(output.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=sending,
            finished_recving=receiving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )


class EngineDouble:
    """Schedules, executes in order on every rank, and delivers outputs `depth` - 1 steps later.

    With stages it has vLLM's rhythm of a pipeline: as long as fewer than `depth` batches are in flight it schedules, and
    else it waits for the first of them. `most` batches were in flight at a time.
    """

    def __init__(self, scheduler: AsyncScheduler, shape: Shape, seed: int = 0) -> None:
        self.scheduler, self.shape, self.random = scheduler, shape, Random(seed)
        self.ranks = [Rank(scheduler, shape, self.random) for _ in range(shape.ranks)]
        self.aggregator = KVOutputAggregator(shape.ranks)
        self.flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.now, self.most = 0.0, 0
        scheduler.clock = lambda: self.now

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.flight.append((output, self._execute(output)))
        self.most = max(self.most, sum(bool(batch.num_scheduled_tokens) for batch, _ in self.flight))
        if self.shape.stages > 1:
            if len(self.flight) >= self.shape.depth:
                self._deliver()
            while self.flight and not self.scheduler.has_requests():
                self._deliver()
        else:
            busy = output.total_num_scheduled_tokens > 0
            while len(self.flight) >= self.shape.depth or (self.flight and not busy):
                self._deliver()
        self.now += 0.01 + 0.001 * output.total_num_scheduled_tokens
        return output

    def pending_requests(self) -> set[str]:
        """Return the requests whose token must return, or pass the pipeline's stages, before their next step."""
        stages = self.shape.stages
        batches = list(self.flight)
        if self.shape.asynchronous:
            batches = batches[len(batches) - stages + 1 :]
        elif stages == 1:
            return set()
        sampled = (zip(report.req_ids, report.sampled_token_ids, strict=True) for _, report in batches)
        return {name for batch in sampled for name, tokens in batch if tokens}

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        copies = [meta, *(deepcopy(meta) for _ in self.ranks[1:])]
        reports = [rank.execute(output, mine) for rank, mine in zip(self.ranks, copies, strict=True)]
        assert all(report.sampled_token_ids == reports[0].sampled_token_ids for report in reports)
        return self.aggregator.aggregate(reports) if len(reports) > 1 else reports[0]

    def _deliver(self) -> None:
        output, report = self.flight.popleft()
        for name, tokens in zip(report.req_ids, report.sampled_token_ids, strict=True):
            for rank in self.ranks:
                rank.delivered(name, tokens)
        done = self.scheduler.update_from_output(output, report)
        for per_client in done.values():
            for item in per_client.outputs:
                self.outputs[item.request_id] += item.new_token_ids
