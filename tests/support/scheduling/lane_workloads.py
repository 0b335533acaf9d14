"""Random workloads for the express lane, and the invariants checked after every step of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from coldstart.vllm.scheduling.lane import LaneScheduler
from coldstart.vllm.scheduling.states import State
from tests.support.scheduling.engine_double import BLOCK, EngineDouble, Shape, build, make_request
from tests.support.scheduling.workloads import MOST_STEPS, Load, Run

Steps = list[tuple[dict[str, int], set[str]]]
"""Of each step, the tokens computed by request and who was evicted."""


def lane_load(seed: int) -> Load:
    """Many short requests and a few long ones, so that somebody passes, on pools that bind or do not."""
    random = Random(f"lane {seed}")
    load = Load(_shape(random))
    longest = min(120, (load.shape.blocks - 2) * BLOCK - 2)
    stems = [[random.randrange(1000) for _ in range(random.randrange(4, 24))] for _ in range(2)]
    lengths = random.choice([[2, 2, 3, 60], [1, 4, 30], [12], [2, 2, 2, 2, 90]])
    for number in range(random.randrange(8, 36)):
        stem = random.choice(stems) if random.random() < 0.3 else []
        own = [random.randrange(1000) for _ in range(random.choice([1, 3, 9, 40]))]
        prompt = (stem + own)[: longest // 2]
        output = max(1, min(random.choice(lengths), longest - len(prompt)))
        when = random.randrange(0, random.choice([10, 60, 150]))
        load.arrivals.setdefault(when, []).append((f"r{number}", prompt, output, 0))
        if random.random() < 0.1:
            load.aborts[when + random.randrange(1, 40)] = f"r{number}"
    return load


def _shape(random: Random) -> Shape:
    batch = random.choice([1, 2, 3, 5])
    return Shape(
        slots=random.choice([batch, batch + 2, 16]),
        batch=batch,
        tokens=random.choice([8, 24, 64]),
        blocks=random.choice([12, 18, 30, 200]),
        host_blocks=random.choice([None, None, 3, 12, 60]),
        prefix=True,
        depth=random.choice([1, 2]),
        settings={
            "policy": "express",
            "price": random.choice([0.05, 0.1, 0.3]),
            "margin": random.choice([1.0, 2.0]),
            "trust": random.choice([1, 2, 5]),
            "profile": random.choice([None, STEEP]),
        },
    )


STEEP = {"prefill": [[1, 0.01], [8, 0.02], [200, 2.0]], "decode": [[1, 0.01], [8, 0.012]]}
"""So dear a prefill that contexts are worth a load from the host."""


class LaneChecked(Run):
    """One workload under the express lane; every step is checked."""

    def __init__(self, folder: Path, load: Load, seed: int, cls: type[LaneScheduler] = LaneScheduler) -> None:
        super().__init__(folder, load, seed, cls)
        self.evicted: list[Request] = []
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._decided
        self._evict, self.scheduler.view.evict = self.scheduler.view.evict, self._victim

    def _decided(self, throttle_prefills: bool = False) -> SchedulerOutput:
        before = self.engine.in_flight()
        output: SchedulerOutput = self._schedule(throttle_prefills)
        self._within(output, before)
        self._hidden(output)
        self._conserving(output)
        return output

    def _victim(self, request: Request) -> bool:
        lane = self.scheduler.lane
        name = request.request_id
        assert name in lane.parked or name in lane.paused or name in lane.members, (
            f"{name} of the main lane was evicted for the lane"
        )
        gone: bool = self._evict(request)
        assert not (gone and name in self.engine.in_flight()), f"{name} left a batch in flight"
        return gone

    def _hidden(self, output: SchedulerOutput) -> None:
        scheduler = self.scheduler
        hidden = list(scheduler.lane.hidden())
        tail = scheduler.running[len(scheduler.running) - len(hidden) :]
        assert set(hidden) == set(tail) and len(set(hidden)) == len(hidden), (
            "hidden is not the end of the list"
        )
        for request in hidden:
            assert request.request_id not in output.num_scheduled_tokens, "a hidden request was served"
            assert request.request_id not in scheduler.lane.members
            assert request.status == RequestStatus.RUNNING

    def _conserving(self, output: SchedulerOutput) -> None:
        """Nobody waits beside a slot and memory for everybody ahead of it."""
        scheduler, shape = self.scheduler, self.load.shape
        if output.total_num_scheduled_tokens >= shape.tokens or output.preempted_req_ids:
            return
        running = len(scheduler.running) - scheduler.hidden
        first = next(iter(scheduler.line), None)
        if (
            first is None
            or scheduler.state(first) is not State.NEW
            or running >= shape.batch
            or len(scheduler.running) >= shape.slots
        ):
            return
        # What the main lane leaves to the lane, and what everybody who runs may need next.
        spared = shape.settings["price"] * shape.blocks + 2 * running + shape.blocks // 8 + 4
        free = scheduler.view.free_blocks() - spared
        waits = (
            scheduler.view.needs(first) <= free and not scheduler.host.away and not len(scheduler.arriving)
        )
        assert not waits, f"{first.request_id} waits beside a free slot and {free} blocks"

    def _step(self) -> None:
        output = self.engine.step()
        scheduler, ledger = self.scheduler, self.scheduler.policy.ledger
        self._places(scheduler.policy)
        numbers = [scheduler.policy.number(r.request_id) for r in scheduler.line]
        assert numbers == sorted(numbers), "the line is out of the order of arrival"
        assert ledger.taken_s <= ledger.price * ledger.crowded_s + ledger.owed_s + 1e-9, (
            "the lane took too much"
        )
        waiting = {name for name in scheduler.jobs if name in scheduler.policy.waiting}
        outside = {r.request_id for r in (*scheduler.line, *scheduler.lane.parked.values())}
        assert waiting <= outside, "a candidate that runs"
        self._note(output)

    def _finished(self) -> None:
        super()._finished()
        scheduler = self.scheduler
        lane = scheduler.lane
        assert not (scheduler.jobs or lane.members or lane.parked or lane.paused or len(scheduler.policy))
        assert not len(scheduler.policy.waiting) and not scheduler.host.away
        assert not scheduler.line and not scheduler.arriving


def steps_of(folder: Path, load: Load, seed: int, cls: type[AsyncScheduler]) -> Steps:
    """The schedule that a class makes of a workload."""
    scheduler = build(folder, load.shape, cls)
    engine, found = EngineDouble(scheduler, load.shape, seed), Steps()
    last = max([*load.arrivals, *load.aborts], default=0)
    while len(found) <= last or scheduler.has_requests():
        assert len(found) < MOST_STEPS
        for row in load.arrivals.get(len(found), []):
            engine.add(make_request(*row))
        if len(found) in load.aborts:
            engine.abort(load.aborts[len(found)])
        output = engine.step()
        found.append((dict(output.num_scheduled_tokens), set(output.preempted_req_ids or ())))
    return found


def without_price(load: Load) -> Load:
    """The same on an engine that lets nobody pass, without memory of the host."""
    settings = load.shape.settings | {"price": 0.0}
    return replace(load, shape=replace(load.shape, host_blocks=None, settings=settings))


def of_one_length(seed: int) -> Load:
    """Constant lengths, and memory for everybody."""
    random = Random(f"constant {seed}")
    shape = Shape(
        slots=16, batch=4, blocks=800, depth=random.choice([1, 2]), settings={"policy": "express", "trust": 5}
    )
    load = Load(shape)
    for number in range(60):
        prompt = [number % 997, *(random.randrange(1000) for _ in range(9))]
        load.arrivals.setdefault(3 * number, []).append((f"r{number}", prompt, 15, 0))
    return load
