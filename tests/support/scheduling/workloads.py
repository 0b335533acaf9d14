"""Random workloads of mixed features, and the invariants checked after every step of one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, Self

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from coldstart.scheduling.job import Job
from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from tests.support.scheduling.engine_double import BLOCK, EngineDouble, Shape, build, expected, make_request
from tests.support.scheduling.scheduling_rules import Rules

MOST_STEPS = 6000


@dataclass
class Load:
    """Requests by the step they arrive in, and the steps at which one is aborted."""

    shape: Shape
    arrivals: dict[int, list[tuple[str, list[int], int, int]]] = field(default_factory=dict)
    aborts: dict[int, str] = field(default_factory=dict)
    pause: int | None = None  # from this step until those in progress have ended, vLLM admits no others
    adapters: int | None = None  # vLLM's limit of LoRA adapters in one batch

    @property
    def wanted(self) -> dict[str, list[int]]:
        rows = (row for rows in self.arrivals.values() for row in rows)
        return {name: expected(prompt, output) for name, prompt, output, _ in rows}


def parallelize(load: Load, seed: int, *, stages: int, tensor: int) -> Load:
    """Return the same requests for a parallel engine; the seed selects asynchronous scheduling of a pipeline."""
    depth = stages + seed % 2 if stages > 1 else load.shape.depth
    return replace(load, shape=replace(load.shape, stages=stages, tensor=tensor, depth=depth))


def random_load(seed: int) -> Load:
    random = Random(seed)
    load = Load(_random_shape(random))
    longest = min(120, (load.shape.blocks - 1) * BLOCK)
    stems = [[random.randrange(1000) for _ in range(random.randrange(4, 24))] for _ in range(2)]
    for number in range(random.randrange(2, 16)):
        stem = random.choice(stems) if random.random() < 0.4 else []
        prompt = (stem + [random.randrange(1000) for _ in range(random.choice([1, 3, 9, 40]))])[
            : longest // 2
        ]
        output = min(random.choice([1, 2, 6, 30, 60]), longest - len(prompt))
        when = random.randrange(0, 60)
        priority = random.choice([0, 0, 0, -1, 2])
        load.arrivals.setdefault(when, []).append((f"r{number}", prompt, output, priority))
        if random.random() < 0.15:
            load.aborts[when + random.randrange(1, 40)] = f"r{number}"
    return load


def _random_shape(random: Random) -> Shape:
    batch = random.choice([1, 2, 3, 5])
    return Shape(
        slots=random.choice([batch, batch + 2, 16]),
        batch=batch,
        tokens=random.choice([8, 24, 64]),
        blocks=random.choice([12, 18, 30, 200]),
        host_blocks=random.choice([None, None, 3, 12, 60]),
        depth=random.choice([1, 2]),
        settings={
            "alpha_s": random.choice([0.05, 0.5, 5.0]),
            "mlfq": random.choice(["paper", "tempered"]),
            "oldest_share": random.choice([0.0, 0.0, 0.5]),
            "strategy": random.choice(["proactive", "reactive"]),
            "eta": random.choice([1, 2]),
        },
    )


class Checked:
    """One workload under skip-join MLFQ on one engine; each step, and what must be true at its end, is checked."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.scheduler: Any = build(load.shape, PolicyScheduler)
        self.scheduler.lora_config = SimpleNamespace(max_loras=load.adapters) if load.adapters else None
        self.engine = EngineDouble(self.scheduler, load.shape, seed)
        self.rules = Rules(self.scheduler, self.engine.pending_requests)

    def run(self) -> Self:
        step, last = 0, max([*self.load.arrivals, *self.load.aborts], default=0)
        while step <= last or self.scheduler.has_requests():
            assert step < MOST_STEPS, "not finished in bounded steps"
            for row in self.load.arrivals.get(step, []):
                request = make_request(*row)
                request.lora_request = LoRARequest("adapter", 1 + len(row[1]) % 3, "/")
                self.engine.add(request)
            if step == self.load.pause:
                self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            if step in self.load.aborts:
                self.engine.abort(self.load.aborts[step])
            self._step()
            if not self.scheduler.has_unfinished_requests():
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
            step += 1
        self._finished()
        return self

    def _within(self, output: SchedulerOutput, in_flight: set[str]) -> None:
        """Check batch size, token budget and slots, and that no request `in_flight` before the step is in it."""
        shape = self.load.shape
        again = in_flight.intersection(output.num_scheduled_tokens)
        assert not again, f"{again} in two batches of the pipeline"
        assert len(output.num_scheduled_tokens) <= shape.batch
        assert sum(output.num_scheduled_tokens.values()) <= shape.tokens
        assert len(self.scheduler.running) <= shape.slots

    def _places(self, ranked: Iterable[Job]) -> None:
        """Check that each live request is in exactly one of vLLM's queues and in the ranking."""
        scheduler = self.scheduler
        places = Counter(r.request_id for r in scheduler.running)
        places.update(r.request_id for r in scheduler.waiting)
        places.update(r.request_id for r in scheduler.kv_holding_waiting)
        assert all(count == 1 for count in places.values()), f"in two places: {places}"
        live = {name for name, request in scheduler.requests.items() if not request.is_finished()}
        assert set(places) == live == {job.id for job in ranked} == set(scheduler.jobs)

    def _finished(self) -> None:
        for name, wanted in self.load.wanted.items():
            got = self.engine.outputs.get(name, [])
            aborted = name in self.load.aborts.values()
            assert got == wanted[: len(got)] and (aborted or len(got) == len(wanted)), (
                f"{name} came out wrong"
            )
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.load.shape.blocks - 1, "leaked blocks"
        assert not self.scheduler.jobs and not self.scheduler.fresh and len(self.scheduler.ranking) == 0

    def _step(self) -> None:
        has_room = (self.load.shape.blocks, self.load.shape.slots) == (200, 16)
        wanted = self._wanted() if has_room else None
        asked = sum(map(self._tokens, wanted or ()))
        before = self.engine.pending_requests()
        output = self.engine.step()
        scheduled = set(output.num_scheduled_tokens)
        self._within(output, before)
        started = self.scheduler.started
        assert scheduled.isdisjoint(request.request_id for request in started.parked), (
            "a parked request is served"
        )
        assert set(started) >= set(self.scheduler.running), "vLLM runs a request without a slot"
        if wanted is not None and asked < self.load.shape.tokens:
            assert scheduled == wanted, "a ready job of higher rank idles"
        self._served(output)
        self._places(self.scheduler.ranking)

    def _served(self, output: SchedulerOutput) -> None:
        """Check that each chosen request runs; a joining request may wait for a load."""
        missing = {r for r in self.rules.chosen if r.request_id not in output.num_scheduled_tokens}
        if self.scheduler.connector is not None:
            missing = {request for request in missing if request.status == RequestStatus.RUNNING}
        spent = output.total_num_scheduled_tokens >= self.load.shape.tokens
        assert spent or not missing, f"chosen but not run: {sorted(r.request_id for r in missing)}"

    def _wanted(self) -> set[str]:
        scheduler = self.scheduler
        scheduler._account_time(self.engine.now)  # as the step does: the ranking depends on it
        scheduler.ranking.promote_starved_jobs(self.engine.now, scheduler.batch)
        return {request.request_id for request in scheduler.placement.pick()}

    def _tokens(self, name: str) -> int:
        request = self.scheduler.requests.get(name)
        return 1 if request is None else request.num_tokens + 2 - request.num_computed_tokens
