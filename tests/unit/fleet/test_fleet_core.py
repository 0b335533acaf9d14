"""The core under any order of events: no request is forgotten, and no memory or bandwidth is promised twice."""

from dataclasses import replace
from math import inf
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tools.examples import examples

from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import DispatchRequest, Event, LaunchRank, MoveStream, RejectRequest, StopWorker
from coldstart.fleet.groups import GroupPhase
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec

COSTS = Costs(2.0, 1.0, 2.0, 0.1, 0.01, 1.0, 0.05)
SERVERS = [ServerSpec(f"s{n}", 60, 4.0, 20.0, devices=1 + n % 2) for n in range(4)]
MODELS = [
    FleetModel("small", 20, 25, COSTS, ttft_s=30.0, batch=2, idle_s=15.0),
    FleetModel("large", 40, 50, COSTS, ttft_s=9.0, tpot_s=0.2, batch=3, idle_s=40.0),
    FleetModel("kept", 20, 25, COSTS, batch=2, least=1, most=2),
]
TWICE = [replace(MODELS[0], held_twice=1.0), replace(MODELS[1], memory=48, held_twice=1.0)]
NAMES = [model.name for model in MODELS]


def core(models: list[FleetModel] = MODELS, **given: object) -> FleetCore:
    return FleetCore(FleetSettings(**given), SERVERS, models)  # type: ignore[arg-type]


class Fleet(RuleBasedStateMachine):
    """State machine that executes actions in any order, loses servers and workers, and keeps its own counts."""

    @initialize(
        held_twice=st.sampled_from([0.0, 0.5, 1.0]),
        reclaim=st.booleans(),
        consolidate=st.booleans(),
        retries=st.integers(0, 3),
    )
    def begin(self, held_twice: float, **given: object) -> None:
        models = [replace(model, held_twice=held_twice) for model in MODELS]
        self.core, self.now, self.count = core(models, **given), 0.0, 0
        self.waiting: dict[str, str] = {}
        self.at: dict[str, str] = {}
        self.to: dict[str, str] = {}
        self.in_flight: dict[str, int] = {}
        self.workers: dict[str, LaunchRank] = {}
        self.ready: set[str] = set()
        self.stopping: set[str] = set()
        self.refused: dict[str, int] = {}
        self.model: dict[str, str] = {}
        self.servers = {server.name: server for server in SERVERS}
        self.drained: set[str] = set()
        self.handle(events.Tick())

    def handle(self, event: Event) -> None:
        for action in self.core.handle(event, self.now):
            match action:
                case LaunchRank(worker, server=server):
                    assert worker not in self.workers and server not in self.drained
                    self.workers[worker] = action
                case StopWorker(worker):
                    assert worker in self.workers and worker not in self.stopping
                    used = {*self.at.values(), *self.to.values()}
                    assert self.workers[worker].group not in used, "a request uses it"
                    self.stopping.add(worker)
                case DispatchRequest(request, group):
                    self.waiting.pop(request, None)
                    self.check_serves(group)
                    self.at[request] = group
                case MoveStream(request, source, target):
                    assert self.at[request] == source and request not in self.to
                    self.check_serves(target)
                    self.to[request] = target
                case RejectRequest(request, status):
                    self.waiting.pop(request, None)
                    self.at.pop(request, None)
                    self.refused[request] = status

    def check_serves(self, group: str) -> None:
        """Check that all workers of a group are ready, and that none of their servers is drained."""
        members = [w for w in self.workers.values() if group == w.group]
        assert members and all(w.worker in self.ready - self.stopping for w in members)
        assert self.drained.isdisjoint(w.server for w in members)

    def drop(self, worker: str) -> None:
        """Remove a worker; the streams of its group wait again."""
        launch = self.workers.pop(worker)
        for request, group in list(self.at.items()):
            if group == launch.group:
                self.waiting[request] = self.model[request]
                del self.at[request]
                self.to.pop(request, None)
        self.to = {request: group for request, group in self.to.items() if group != launch.group}
        for known in (self.ready, self.stopping):
            known.discard(worker)

    @rule(name=st.sampled_from(NAMES), many=st.integers(1, 4))
    def arrive(self, name: str, many: int) -> None:
        for _ in range(many):
            self.count += 1
            request = str(self.count)
            self.waiting[request] = self.model[request] = name
            self.handle(events.RequestArrived(request, name))

    @rule(seconds=st.floats(0.1, 20.0))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(200):
            if (due := self.core.deadline()) > end:
                break
            self.now = max(self.now, due)
            self.handle(events.Tick())
        else:
            raise AssertionError("deadlines without end")
        self.now = end

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), fetched=st.booleans())
    def rank_becomes_ready(self, data: st.DataObject, fetched: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        if fetched:
            self.handle(events.WeightsFetched(worker))
        if worker not in self.stopping:
            self.ready.add(worker)
        self.handle(events.RankReady(worker))

    @precondition(lambda self: self.to)
    @rule(data=st.data(), done=st.booleans())
    def stream_moves(self, data: st.DataObject, done: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.to, key=int)))
        target = self.to.pop(request)
        if done:
            self.at[request] = target
        self.handle(events.StreamMoved(request, done))

    @precondition(lambda self: self.stopping)
    @rule(data=st.data())
    def worker_stops(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.stopping)))
        self.drop(worker)
        self.handle(events.WorkerEnded(worker))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.drop(worker)
        self.handle(events.WorkerEnded(worker, "killed"))

    @rule(name=st.sampled_from(sorted(server.name for server in SERVERS)), back=st.booleans())
    def server_leaves_or_joins(self, name: str, back: bool) -> None:
        self.drained.discard(name)
        if name not in self.servers:
            self.servers[name] = next(server for server in SERVERS if server.name == name)
            self.handle(events.ServerJoined(self.servers[name]))
            return
        lost = [worker for worker, launch in self.workers.items() if launch.server == name]
        for worker in lost:
            self.drop(worker)
        if back:
            self.handle(events.ServerJoined(self.servers[name]))
        else:
            del self.servers[name]
            self.handle(events.ServerLost(name))

    @rule(name=st.sampled_from(sorted(server.name for server in SERVERS)), data=st.data())
    def server_is_drained(self, name: str, data: st.DataObject) -> None:
        streams = data.draw(st.frozensets(st.sampled_from(sorted(self.at)))) if self.at else frozenset()
        if name in self.servers:
            self.drained.add(name)
        self.handle(events.ServerDrained(name, streams))

    @precondition(lambda self: self.at or self.waiting)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.at | self.waiting, key=int)))
        for known in (self.at, self.waiting, self.to):
            known.pop(request, None)
        self.handle(events.RequestEnded(request))

    @rule(name=st.sampled_from(NAMES))
    def model_is_removed_and_deployed(self, name: str) -> None:
        self.handle(events.ModelRemoved(name))
        self.handle(events.ModelDeployed(next(model for model in MODELS if model.name == name)))

    @invariant()
    def memory_adds_up(self) -> None:
        if not hasattr(self, "core"):
            return
        roster = self.core.roster
        assert roster.workers.keys() == self.workers.keys()
        assert roster.servers.keys() == self.servers.keys()
        for name, server in roster.servers.items():
            for device, free in enumerate(server.free):
                held = [w for w in roster.workers.values() if (w.server, w.launch.device) == (name, device)]
                assert free >= 0 and free + sum(w.memory for w in held) == server.spec.memory
            known = {*server.reservations.link.pending, *server.reservations.link.background}
            assert known <= {w.name for w in roster.workers.values() if w.server == name and not w.stopping}

    @invariant()
    def every_request_waits_or_runs(self) -> None:
        if not hasattr(self, "core"):
            return
        waiting = {request for model in self.core.models.values() for request in model.waiting}
        assert waiting == self.waiting.keys() and self.core.waiting_count == len(waiting)
        in_flight = {
            r: g.name for g in self.core.groups.values() for r in g.in_flight if self.to.get(r) != g.name
        }
        assert in_flight == self.at
        # The capacity of a pipeline decreases when a replacement dies. Its running requests remain.
        before, self.in_flight = self.in_flight, {g.name: len(g.in_flight) for g in self.core.groups.values()}
        for group in self.core.groups.values():
            allowed = max(group.capacity, len(self.to), before.get(group.name, 0))
            assert group.phase is GroupPhase.LEAVING or len(group.in_flight) <= allowed

    def teardown(self) -> None:
        """Execute all orders and end all streams; every request must then be answered."""
        if not hasattr(self, "core"):
            return
        for server in SERVERS:
            if server.name not in self.servers:
                self.servers[server.name] = server
                self.handle(events.ServerJoined(server))
        for _ in range(5000):
            if not self.waiting:
                return
            if starting := [w for w in self.workers if w not in self.ready and w not in self.stopping]:
                self.ready.add(starting[0])
                self.handle(events.RankReady(starting[0]))
            elif self.stopping:
                worker = self.stopping.pop()
                self.drop(worker)
                self.handle(events.WorkerEnded(worker))
            elif self.at:
                request = next(iter(self.at))
                self.at.pop(request)
                self.to.pop(request, None)
                self.handle(events.RequestEnded(request))
            else:
                assert self.core.deadline() < inf, "requests wait without a deadline"
                self.now = max(self.now, self.core.deadline())
                self.handle(events.Tick())
        raise AssertionError(f"never answered: {self.waiting}")


TestFleet = Fleet.TestCase
TestFleet.settings = examples(60, stateful_step_count=30)


def launches(actions: list[events.Action]) -> list[LaunchRank]:
    return [action for action in actions if isinstance(action, LaunchRank)]


def test_a_pipeline_becomes_one_worker_without_losing_its_stream() -> None:
    """large: 40 bytes at 4 bytes/s take 10 s and its SLO is 9 s: two ranks, of which one remains."""
    one = core(MODELS[:2])
    ranks = launches(one.handle(events.RequestArrived("1", "large"), 0.0))
    group = ranks[0].group
    assert [(r.size, r.memory, r.rank, r.ranks, r.full) for r in ranks] == [
        (20, 50, 0, 2, 1),
        (20, 25, 1, 2, 1),
    ]
    assert ranks[0].server != ranks[1].server and ranks[0].deadline == pytest.approx(9.0 - 0.2 - 1.5 - 0.02)
    assert one.handle(events.RankReady(ranks[0].worker), 5.0) == []
    first, second = ranks[0].worker, ranks[1].worker
    single, sent = one.handle(events.RankReady(second), 6.0)
    assert isinstance(single, LaunchRank) and sent == DispatchRequest("1", group)
    assert (single.beside, single.server, single.fetch, single.memory) == (first, ranks[0].server, 20, 50)
    assert one.handle(events.RankReady(single.worker), 12.0) == [MoveStream("1", group, single.group)]
    assert one.handle(events.StreamMoved("1", True), 12.3) == [StopWorker(first), StopWorker(second)]
    assert one.handle(events.RequestArrived("2", "large"), 13.0) == [DispatchRequest("2", single.group)]
    assert one.handle(events.RequestEnded("2"), 14.0) == []
    assert one.handle(events.RequestEnded("1"), 15.0) == []
    assert one.handle(events.Tick(), 15.0 + MODELS[1].idle_s) == [StopWorker(single.worker)]


@pytest.mark.parametrize(("memory", "free"), [(55, [5]), (65, None)])
def test_full_worker_has_the_memory_of_a_later_deployment(memory: int, free: list[int] | None) -> None:
    one = core(MODELS[:2])
    ranks = launches(one.handle(events.RequestArrived("1", "large"), 0.0))
    one.handle(events.ModelDeployed(replace(MODELS[1], memory=memory)), 1.0)
    one.handle(events.RankReady(ranks[0].worker), 5.0)
    singles = launches(one.handle(events.RankReady(ranks[1].worker), 6.0))
    assert [one.roster.servers[single.server].free for single in singles] == ([free] if free else [])


def _consolidated() -> tuple[FleetCore, list[LaunchRank], LaunchRank]:
    """Return a pipeline of four with one stream, and the ready worker that replaces it."""
    one = core(TWICE)
    ranks = launches(one.handle(events.RequestArrived("1", "large"), 0.0))
    (single,) = [
        launch for rank in ranks for launch in launches(one.handle(events.RankReady(rank.worker), 5.0))
    ]
    one.handle(events.RankReady(single.worker), 12.0)
    return one, ranks, single


def test_pipeline_stops_after_its_last_stream() -> None:
    one, ranks, single = _consolidated()
    device = one.roster.servers[single.server].free
    assert one.handle(events.StreamMoved("1", False), 12.5) == []
    assert one.handle(events.Tick(), 13.0) == [] and device == [0]
    assert one.handle(events.RequestEnded("1"), 50.0) == [StopWorker(rank.worker) for rank in ranks]
    assert one.handle(events.WorkerEnded(ranks[0].worker), 51.0) == []
    assert device == [ranks[0].memory - TWICE[1].memory] == [12]
    assert one.handle(events.Tick(), 50.0 + MODELS[1].idle_s) == [StopWorker(single.worker)]


def test_pipeline_ends_its_stream_when_the_worker_that_replaced_it_dies() -> None:
    one, ranks, single = _consolidated()
    one.handle(events.StreamMoved("1", False), 13.0)
    one.handle(events.WorkerEnded(single.worker, "killed"), 15.0)
    assert ranks[0].group in one.groups and single.group not in one.groups
    actions = one.handle(events.RequestEnded("1"), 16.0)
    assert [StopWorker(rank.worker) for rank in ranks] == [a for a in actions if isinstance(a, StopWorker)]


@pytest.mark.parametrize("ready", [False, True])
def test_a_fleet_that_begins_again_does_not_consolidate_a_second_time(ready: bool) -> None:
    one, ranks, single = _consolidated()
    again = FleetCore(FleetSettings(), [], TWICE)
    found = [*(events.FoundRank(rank, True) for rank in ranks), events.FoundRank(single, ready)]
    servers = [server.spec for server in one.roster.servers.values()]
    actions = again.handle(events.FleetRecovered(tuple(servers), tuple(found)), 0.0)
    # Both together have the memory that the rank was launched with.
    assert again.roster.servers[ranks[0].server].free == [0]
    assert actions == ([StopWorker(rank.worker) for rank in ranks] if ready else [])
    assert again.models["large"].number == 2


def test_start_evicts_elsewhere_before_it_retries_the_failed_server() -> None:
    full, other = SERVERS[0], replace(SERVERS[2], name="other")
    small, sitting = replace(MODELS[0], most=1, idle_s=100.0), replace(MODELS[0], name="sitting", memory=60)
    one = FleetCore(FleetSettings(), [full, other], [small, sitting])
    one.handle(events.ServerDrained(full.name), 0.0)
    (sits,) = launches(one.handle(events.RequestArrived("1", "sitting"), 0.0))
    one.handle(events.RankReady(sits.worker), 1.0)
    one.handle(events.RequestEnded("1"), 1.0)
    assert sits.server == other.name
    one.handle(events.ServerJoined(full), 2.0)
    (first,) = launches(one.handle(events.RequestArrived("2", "small"), 3.0))
    assert first.server == full.name
    one.handle(events.WorkerEnded(first.worker, "no space left on device"), 3.0)
    assert StopWorker(sits.worker) in (actions := one.handle(events.Tick(), one.deadline())) and not launches(
        actions
    )
    (second,) = launches(one.handle(events.WorkerEnded(sits.worker), 5.0))
    assert second.server == other.name
    # Without another server the start is retried there.
    one.handle(events.ServerLost(other.name), 6.0)
    actions = one.handle(events.Tick(), one.deadline())
    assert [rank.server for rank in launches(actions)] == [full.name]


def test_single_worker_starts_when_the_pipeline_did_not() -> None:
    one = core(MODELS[:2])
    first, _ = ranks = launches(one.handle(events.RequestArrived("1", "large"), 0.0))
    assert "the limit is 9 s" in one.groups[first.group].choice
    one.handle(events.WorkerEnded(first.worker, "no bundle for 2 ranks"), 1.0)
    for rank in ranks:
        one.handle(events.WorkerEnded(rank.worker), 1.0)
    # Three ranks of an other bundle may start: only this size failed.
    again = launches(one.handle(events.Tick(), one.deadline()))
    assert len(again) == 3
    one.handle(events.WorkerEnded(again[0].worker, "no bundle for 3 ranks"), 3.0)
    for rank in again:
        one.handle(events.WorkerEnded(rank.worker), 3.0)
    while not (last := launches(one.handle(events.Tick(), one.deadline()))):
        pass
    assert len(last) not in (2, 3)
    assert one.models["large"].failed_ranks.keys() == {2, 3}


def test_changed_deployment_starts_at_once_after_a_failed_start() -> None:
    one = FleetCore(FleetSettings(), SERVERS[:1], MODELS[:1])
    (first,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    one.handle(events.WorkerEnded(first.worker, "invalid argument"), 1.0)
    one.handle(events.ModelRemoved("small"), 1.0)
    one.handle(events.ModelDeployed(MODELS[0]), 1.0)
    assert launches(one.handle(events.RequestArrived("2", "small"), 1.0))


def test_waiting_request_is_refused_after_the_hold_time() -> None:
    one = FleetCore(FleetSettings(hold_s=20.0), [], MODELS[:1])
    assert one.handle(events.RequestArrived("1", "small"), 0.0) == []
    assert [a.status for a in one.handle(events.Tick(), 20.0) if isinstance(a, RejectRequest)] == [504]
    assert [
        a.status
        for a in one.handle(events.RequestArrived("2", "unknown"), 21.0)
        if isinstance(a, RejectRequest)
    ] == [404]


def test_models_that_wait_for_memory_are_placed_a_few_at_a_time() -> None:
    """A decision does not take longer the more models wait; the rest follows at once, in the order of arrival."""
    many = [replace(MODELS[0], name=f"m{number}", ttft_s=inf) for number in range(40)]
    one = FleetCore(FleetSettings(), [], many)
    while one.deadline() == -inf:
        one.handle(events.Tick(), 0.0)
    for number in range(40):
        assert one.handle(events.RequestArrived(str(number), f"m{number}"), 1.0) == []
    started = launches(one.handle(events.ServerJoined(replace(SERVERS[0], devices=40)), 2.0))
    assert 0 < len(started) < 40
    while one.deadline() == -inf:
        started += launches(one.handle(events.Tick(), 2.0))
    assert [launch.model for launch in started] == [model.name for model in many]


def test_a_least_number_of_workers_is_kept() -> None:
    one = core()
    started = launches(one.handle(events.Tick(), 0.0))
    assert [launch.model for launch in started] == ["kept"]
    one.handle(events.RankReady(started[0].worker), 5.0)
    for _ in range(5):
        assert one.handle(events.Tick(), one.deadline()) == []


def _grown(servers: list[ServerSpec]) -> tuple[FleetCore, list[LaunchRank], list[events.Action]]:
    """Send five requests to a model with three per worker: a pipeline of two, launched for the first, serves them."""
    one, ranks = FleetCore(FleetSettings(), servers, TWICE), list[LaunchRank]()
    for request in "12345":
        ranks += launches(one.handle(events.RequestArrived(request, "large"), 0.0))
    assert [(rank.ranks, rank.full) for rank in ranks] == [(2, 1), (2, 1)], (
        "the links allow no other start in time"
    )
    one.handle(events.RankReady(ranks[0].worker), 5.0)
    return one, ranks, one.handle(events.RankReady(ranks[1].worker), 6.0)


def test_a_pipeline_scales_up_to_what_came_while_it_started() -> None:
    """The second rank now has memory for the full model, and each worker continues with its share of the five streams."""
    one, ranks, actions = _grown([replace(server, memory=80) for server in SERVERS[:2]])
    singles = launches(actions)
    assert [(a.beside, a.fetch) for a in singles] == [(rank.worker, 20) for rank in ranks]
    assert [a.request for a in actions if isinstance(a, DispatchRequest)] == list("12345")
    free = {server: one.roster.servers[server].free for server in (rank.server for rank in ranks)}
    assert sorted(min(devices) for devices in free.values()) == [8, 8]
    assert one.handle(events.RankReady(singles[1].worker), 12.0) == [], "one by itself would be too few"
    moved = [
        action
        for action in one.handle(events.RankReady(singles[0].worker), 13.0)
        if isinstance(action, MoveStream)
    ]
    assert sorted(action.target for action in moved) == [singles[0].group] * 3 + [singles[1].group] * 2
    for action in moved:
        last = one.handle(events.StreamMoved(action.request, True), 14.0)
    assert last == [StopWorker(rank.worker) for rank in ranks]
    for rank in ranks:
        one.handle(events.WorkerEnded(rank.worker), 15.0)
    assert sorted(min(devices) for devices in free.values()) == [32, 32]


def test_pipeline_without_memory_retains_one_worker() -> None:
    _, (first, _), actions = _grown([replace(SERVERS[0], memory=80), SERVERS[2]])
    assert [a.beside for a in launches(actions)] == [first.worker]
    assert [a.request for a in actions if isinstance(a, DispatchRequest)] == list("123")


def test_incomplete_group_stops_and_reserves_its_memory_until_stopped() -> None:
    before = core(consolidate=False)
    ranks = launches(before.handle(events.RequestArrived("1", "large"), 0.0))
    pipeline = [rank for rank in ranks if rank.model == "large"]
    assert len(pipeline) > 1
    after = FleetCore(FleetSettings(consolidate=False), (), MODELS[:2])
    actions = after.handle(
        events.FleetRecovered(tuple(SERVERS), (events.FoundRank(pipeline[0], True),), ("s3",)), 0.0
    )
    assert actions == [StopWorker(pipeline[0].worker)] and not after.groups
    server = after.roster.servers[pipeline[0].server]
    assert min(server.free) == server.spec.memory - pipeline[0].memory
    after.handle(events.WorkerEnded(pipeline[0].worker), 1.0)
    assert min(server.free) == server.spec.memory
    assert after.roster.servers["s3"].draining
    unknown = FleetCore(FleetSettings(), (), ())
    assert unknown.handle(
        events.FleetRecovered(tuple(SERVERS), (events.FoundRank(pipeline[0], True),)), 0.0
    ) == [StopWorker(pipeline[0].worker)]


def test_suspected_group_gets_no_request_for_a_moment() -> None:
    one = core(MODELS[:1], consolidate=False)
    (rank,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    one.handle(events.RankReady(rank.worker), 5.0)
    assert one.handle(events.GroupSuspected(rank.group), 6.0) == []
    assert one.handle(events.RequestEnded("1"), 6.0) == []
    assert one.handle(events.RequestArrived("2", "small"), 6.0) == []
    # It may be alive: its room still counts, and no other group is started.
    assert one.deadline() == 7.0 and one.handle(events.Tick(), 6.9) == []
    assert one.handle(events.Tick(), 7.0) == [DispatchRequest("2", rank.group)]
    assert one.handle(events.GroupSuspected("small#9"), 8.0) == []


def test_servers_whose_links_differ_by_noise_are_filled_one_after_the_other() -> None:
    servers = [ServerSpec("roomy", 200, 4.0, 20.0), ServerSpec("full", 60, 4.0, 20.0)]
    one, link = FleetCore(FleetSettings(), servers, MODELS[:1]), 1.05**-30
    for server, speed in (("roomy", 1.04 * link), ("full", 1.01 * link)):
        one.handle(events.LinkMeasured(server, speed), 0.0)
    (rank,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    assert rank.server == "full"


def _draining(**given: Any) -> tuple[FleetCore, LaunchRank, LaunchRank]:
    """Start two workers with room for two requests on two servers. The first serves requests 1 and 2, the second 3."""
    model = FleetModel("small", 60, 60, COSTS, batch=2, **given)
    one = FleetCore(FleetSettings(), [SERVERS[0], SERVERS[2]], [model])
    ranks = [rank for n in "123" for rank in launches(one.handle(events.RequestArrived(n, "small"), 0.0))]
    first, second = ranks
    for rank in ranks:
        one.handle(events.RankReady(rank.worker), 1.0)
    assert [list(one.groups[rank.group].in_flight) for rank in ranks] == [["1", "2"], ["3"]]
    return one, first, second


def test_streams_of_a_drained_server_move_and_its_worker_stops() -> None:
    one, first, second = _draining()
    drained = events.ServerDrained(first.server, frozenset("12"))
    assert one.handle(drained, 2.0) == [MoveStream("1", first.group, second.group)]
    # The second stream moves as soon as there is room, and a new request waits behind no drained group.
    assert one.handle(events.StreamMoved("1", True), 3.0) == []
    assert one.handle(events.RequestEnded("3"), 4.0) == [MoveStream("2", first.group, second.group)]
    assert one.handle(events.RequestArrived("4", "small"), 5.0) == []
    assert one.handle(events.StreamMoved("2", True), 6.0) == [StopWorker(first.worker)]
    assert one.handle(events.RequestEnded("1"), 7.0) == [DispatchRequest("4", second.group)]


def test_drain_starts_a_worker_elsewhere_and_moves_the_streams_when_it_is_ready() -> None:
    model = FleetModel("small", 60, 60, COSTS, batch=2, most=1)
    one = FleetCore(FleetSettings(), [SERVERS[0], SERVERS[2]], [model])
    (first,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    one.handle(events.RankReady(first.worker), 1.0)
    (second,) = launches(one.handle(events.ServerDrained(first.server, frozenset("1")), 2.0))
    assert second.server != first.server
    assert one.handle(events.RankReady(second.worker), 3.0) == [MoveStream("1", first.group, second.group)]
    assert one.handle(events.StreamMoved("1", True), 4.0) == [StopWorker(first.worker)]


def test_stream_stays_on_the_drained_server_when_its_move_fails() -> None:
    one, first, _ = _draining()
    one.handle(events.ServerDrained(first.server, frozenset("1")), 2.0)
    assert one.handle(events.StreamMoved("1", False), 3.0) == [], "each stream is tried once"
    assert one.handle(events.RequestEnded("2"), 4.0) == []
    assert one.handle(events.RequestEnded("1"), 5.0) == [StopWorker(first.worker)]


def test_drain_stops_a_starting_worker() -> None:
    one = FleetCore(FleetSettings(), SERVERS[:1], MODELS[:1])
    (rank,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    assert one.handle(events.ServerDrained(rank.server), 1.0) == [StopWorker(rank.worker)]
    assert one.handle(events.RankReady(rank.worker), 2.0) == []


def test_streams_do_not_move_to_other_arguments_after_a_drain() -> None:
    one, first, _ = _draining()
    one.handle(events.RequestArrived("4", "small"), 1.0)
    assert one.handle(events.ServerDrained(first.server, frozenset("12")), 2.0) == []
    one.handle(events.ModelRemoved("small"), 3.0)
    one.handle(events.ModelDeployed(FleetModel("small", 60, 60, COSTS, batch=2)), 3.0)
    one.handle(events.ServerJoined(replace(SERVERS[3], memory=100)), 4.0)
    (third,) = launches(one.handle(events.RequestArrived("5", "small"), 5.0))
    assert one.handle(events.RankReady(third.worker), 6.0) == [DispatchRequest("5", third.group)]


def test_restarted_gateway_stops_the_workers_of_a_drained_server() -> None:
    before = FleetCore(FleetSettings(), SERVERS[:1], MODELS[:1])
    (rank,) = launches(before.handle(events.RequestArrived("1", "small"), 0.0))
    after = FleetCore(FleetSettings(), (), MODELS[:1])
    recovered = events.FleetRecovered((SERVERS[0],), (events.FoundRank(rank, True),), (SERVERS[0].name,))
    assert after.handle(recovered, 0.0) == [StopWorker(rank.worker)] and not after.groups


def test_stream_that_ends_before_its_move_is_not_moved() -> None:
    one, first, _ = _draining()
    one.handle(events.ServerDrained(first.server, frozenset("12")), 2.0)
    assert one.handle(events.RequestEnded("2"), 3.0) == []
    assert one.handle(events.RequestEnded("3"), 4.0) == []


def test_stream_that_moves_to_a_drained_server_is_not_moved_again() -> None:
    one, first, second = _draining()
    one.handle(events.ServerDrained(first.server, frozenset("1")), 2.0)
    one.handle(events.ServerDrained(second.server, frozenset("13")), 3.0)
    (third,) = launches(one.handle(events.ServerJoined(SERVERS[1]), 4.0))
    assert one.handle(events.RankReady(third.worker), 5.0) == [MoveStream("3", second.group, third.group)]


def test_drain_starts_no_more_workers_after_failed_starts() -> None:
    model = FleetModel("small", 60, 60, COSTS, batch=2)
    one = FleetCore(FleetSettings(retries=0), [SERVERS[0], SERVERS[2]], [model])
    (first,) = launches(one.handle(events.RequestArrived("1", "small"), 0.0))
    one.handle(events.RankReady(first.worker), 1.0)
    (second,) = launches(one.handle(events.ServerDrained(first.server, frozenset("1")), 2.0))
    assert one.handle(events.WorkerEnded(second.worker, "no space left on device"), 3.0) == []
    assert one.handle(events.Tick(), 1000.0) == []


def test_streams_of_a_drained_server_do_not_move_to_a_pipeline() -> None:
    """The pipeline would move them again while they move."""
    model = FleetModel("m", 40, 60, COSTS, batch=2)
    single = LaunchRank("m#1.0", "m#1", "m", 0, 1, 1, "s0", 0, 40, 0, 60, inf, 1)
    ranks = [
        LaunchRank(f"m#2.{n}", "m#2", "m", n, 2, 0, f"s{2 * n + 1}", 0, 20, 0, 30, inf, 2) for n in range(2)
    ]
    one = FleetCore(FleetSettings(consolidate=False), (), [model])
    found = tuple(events.FoundRank(rank, True) for rank in (single, *ranks))
    one.handle(events.FleetRecovered(tuple(SERVERS), found), 0.0)
    assert one.handle(events.RequestArrived("1", "m"), 1.0) == [DispatchRequest("1", "m#1")]
    assert one.handle(events.ServerDrained("s0", frozenset("1")), 2.0) == []
    assert one.handle(events.RequestArrived("2", "m"), 3.0) == [DispatchRequest("2", "m#2")]
