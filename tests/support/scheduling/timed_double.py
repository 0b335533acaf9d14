"""vLLM's real scheduler and connector on the clock of the simulated engine, as the reference for its counts.

An iteration takes what coldstart.lab.scheduling says it takes; nothing is computed, tokens are numbers. What is
counted is read from vLLM's own objects: preemptions, blocks held at a preemption, tokens computed again, blocks loaded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from coldstart.lab.scheduling import Arrival, SimSettings
from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.scheduling.settings import FCFS
from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from tests.support.scheduling.engine_double import Shape, _Unreplicated, base_config, build, make_request

MODEL_LENGTH = 4096


@dataclass
class Counts:
    """Counts that do not depend on the speed of the machine."""

    evictions: int = 0
    blocks_evicted: int = 0
    recomputed_tokens: int = 0
    blocks_in: int = 0
    iterations: int = 0
    served: int = 0
    latencies: dict[str, float] = field(default_factory=dict)

    @property
    def mean_running(self) -> float:
        return self.served / max(1, self.iterations)


class TimedWorker(OffloadingWorker):  # type: ignore[misc]
    """Each direction of the link carries one transfer at a time."""

    def __init__(self, machine: SimSettings) -> None:
        self.machine, self.start_s, self.now = machine, 0.0, 0.0
        self._free = {True: 0.0, False: 0.0}
        self._jobs: dict[int, tuple[float, int]] = {}
        self.loaded = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, len(src_spec.block_ids), out=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.loaded += len(dst_spec.block_ids)
        return self._submit(job_id, len(dst_spec.block_ids), out=False)

    def get_finished(self) -> list[TransferResult]:
        due = [job_id for job_id, (when, _) in self._jobs.items() if when <= self.now]
        return [TransferResult(job_id, True, self._jobs.pop(job_id)[1], 0.0) for job_id in due]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id] = (0.0, self._jobs[job_id][1])

    def next_landing(self) -> float:
        return min((when for when, _ in self._jobs.values()), default=math.inf)

    def _submit(self, job_id: int, blocks: int, *, out: bool) -> bool:
        self._free[out] = max(self.start_s, self._free[out]) + self.machine.copy_s(blocks)
        self._jobs[job_id] = (self._free[out], blocks)
        return True


class TimedDouble:
    """One engine; `run` it once."""

    def __init__(
        self,
        folder: Path,
        profile: IterationProfile,
        settings: SchedulerSettings,
        machine: SimSettings,
    ) -> None:
        self.profile, self.settings, self.machine = profile, settings, machine
        self.counts, self.now, self.busy_until = Counts(), 0.0, 0.0
        self.scheduler = self._build(folder)
        self.flight: deque[tuple[float, SchedulerOutput, list[str], list[list[int]]]] = deque()
        self.context: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.scheduler.clock = lambda: self.now
        self._count_preemptions()
        self.worker: OffloadingConnectorWorker | None = None
        if self.scheduler.connector is not None:
            self.worker = OffloadingConnectorWorker(
                _Unreplicated(), self.scheduler.vllm_config, self.scheduler.kv_cache_config
            )
            self.timed = self.worker.worker = TimedWorker(machine)

    def run(self, rows: Sequence[Arrival]) -> Counts:
        waiting = deque(enumerate(rows))
        while waiting or self.scheduler.has_requests():
            if not self.scheduler.has_requests():
                self.now = max(self.now, waiting[0][1].arrival_s)
            while waiting and waiting[0][1].arrival_s <= self.now:
                self._add(*waiting.popleft())
            self._step(waiting[0][1].arrival_s if waiting else math.inf)
        return self.counts

    def _build(self, folder: Path) -> AsyncScheduler:
        machine, keeps = self.machine, self.settings.kv_strategy != "recompute"
        host = machine.host_blocks if machine.host_blocks is not None else 1 << 14
        config = base_config(folder, 1 if keeps else None)
        config.model_config.max_model_len = config.scheduler_config.max_model_len = MODEL_LENGTH
        told = self.settings.additional_config()["coldstart_scheduler"]
        assert isinstance(told, dict) and machine.device_blocks is not None
        batch = min(self.settings.batch or machine.slots, machine.slots)
        shape = Shape(
            slots=machine.slots,
            batch=batch,
            tokens=machine.token_budget,
            blocks=machine.device_blocks + 1,
            host_blocks=host if keeps else None,
            depth=machine.depth,
            block=machine.block_tokens,
            settings={**told, "profile": self.profile.encode()},
        )
        return build(folder, shape, AsyncScheduler if self.settings.policy == FCFS else PolicyScheduler)

    def _add(self, number: int, row: Arrival) -> None:
        prompt = [(number * 7919 + place * 31) % 997 for place in range(row.prompt_tokens)]
        prompt[:3] = [number % 997, number // 997, 1][: len(prompt)]
        request = make_request(
            str(number), prompt, max(1, row.output_tokens), block=self.machine.block_tokens
        )
        self.context[str(number)] = row.prompt_tokens
        self.scheduler.add_request(request)

    def _step(self, next_arrival: float) -> None:
        output = self.scheduler.schedule()
        self._execute(output)
        busy = output.total_num_scheduled_tokens > 0
        empty = not busy and len(self.flight) == 1
        while len(self.flight) >= self.machine.depth or (self.flight and not busy):
            self._deliver(*self.flight.popleft())
        landing = self.timed.next_landing() if self.worker is not None else math.inf
        soonest = min(next_arrival, landing)
        if empty and soonest < math.inf:
            self.now = max(self.now, soonest)

    def _execute(self, output: SchedulerOutput) -> None:
        meta = output.kv_connector_metadata
        start_s = max(self.now, self.busy_until)
        if self.worker is not None:
            self.timed.start_s = start_s
            self.worker.handle_preemptions(meta)
            self.worker.start_kv_transfers(meta)
            self.worker.prepare_store_kv(meta)
        names = list(output.num_scheduled_tokens)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._account(starts)
        self.busy_until = start_s + self._seconds(output, starts)
        sampled = [self._sampled(n, starts[n], output.num_scheduled_tokens[n]) for n in names]
        self.flight.append((self.busy_until, output, names, sampled))

    def _sampled(self, name: str, start: int, tokens: int) -> list[int]:
        if start + tokens < self.context[name]:
            return []
        self.context[name] += 1
        return [self.context[name] * 17 % 991]

    def _account(self, starts: dict[str, int]) -> None:
        self.counts.iterations += bool(starts)
        self.counts.served += len(starts)
        for name, start in starts.items():
            self.counts.recomputed_tokens += max(0, self.lost.pop(name, 0) - start)

    def _seconds(self, output: SchedulerOutput, starts: dict[str, int]) -> float:
        if not starts:
            return 0.0
        tokens = output.num_scheduled_tokens
        requests = self.scheduler.requests
        decoding = [
            n for n, t in tokens.items() if t == 1 and self.context[n] > requests[n].num_prompt_tokens
        ]
        prefill = sum(t for n, t in tokens.items() if n not in set(decoding))
        context_s = self.machine.context_s or 0.0
        return self.profile.iteration_s(prefill, len(decoding)) + context_s * sum(starts[n] for n in decoding)

    def _deliver(
        self, end_s: float, output: SchedulerOutput, names: list[str], sampled: list[list[int]]
    ) -> None:
        self.now = max(self.now, end_s)
        transfers = None
        if self.worker is not None:
            self.timed.now = self.now
            sending, receiving = self.worker.get_finished(output.finished_req_ids)
            self.counts.blocks_in = self.timed.loaded
            transfers = KVConnectorOutput(
                finished_sending=sending,
                finished_recving=receiving,
                kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            )
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
                kv_connector_output=transfers,
            ),
        )
        for name in before - set(self.scheduler.requests):
            self.counts.latencies[name] = self.now

    def _count_preemptions(self) -> None:
        scheduler, preempt = self.scheduler, self.scheduler._preempt_request

        def count_and_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
            self.counts.evictions += 1
            held = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
            self.counts.blocks_evicted += sum(map(len, held))
            self.lost[request.request_id] = request.num_computed_tokens
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = count_and_preempt
