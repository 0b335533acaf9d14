"""The host's core under any sequence of events: no used model stops, memory adds up, every request gets one answer."""

from math import inf
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tools.examples import examples

from coldstart.host.core import Core
from coldstart.host.events import (
    Action,
    ChangeTier,
    DispatchRequest,
    Event,
    ModelFailed,
    ModelReady,
    RejectRequest,
    ReplacementEnded,
    ReplaceServer,
    RequestArrived,
    RequestEnded,
    ServerOutdated,
    StartModel,
    Tick,
    TierChanged,
)
from coldstart.host.model_state import ModelState
from coldstart.host.policies import POLICIES
from coldstart.host.specification import HostSettings, ModelSpec, Tier, stopped

NAMES = [f"m{i}" for i in range(6)]
SERVING = (ModelState.READY, ModelState.DRAINING)
"""A model may have to drain at the event that made it ready."""


def _spec(
    name: str, memory: int, penalty: float, kind: str, idle: float | None, devices: tuple[int, ...]
) -> ModelSpec:
    asleep = (Tier("asleep-1", memory // 8, penalty / 10, host_memory=memory),) if kind == "sleeps" else ()
    tiers = (Tier("awake", memory, 0.0), *asleep, stopped(penalty))
    return ModelSpec(name, tiers, pinned=kind == "pinned", idle_s=idle, devices=devices)


class Host(RuleBasedStateMachine):
    """Simulates the processes: executes orders late and in any order, and fails at random."""

    @initialize(
        sizes=st.lists(st.integers(8, 40), min_size=6, max_size=6),
        kinds=st.lists(st.sampled_from(["plain", "plain", "sleeps"]), min_size=6, max_size=6),
        pinned=st.booleans(),
        idle=st.sampled_from([None, 20.0]),
        devices=st.just([()] * 6) | st.lists(st.sampled_from([(0,), (1,), (0, 1)]), min_size=6, max_size=6),
        limits=st.fixed_dictionaries(
            {
                "policy": st.sampled_from(sorted(POLICIES)),
                "loaders": st.integers(1, 2),
                "max_held": st.sampled_from([3, 100]),
                "max_residents": st.sampled_from([None, 2]),
                "host_memory": st.sampled_from([0, 60]),
                "patience_s": st.sampled_from([2.0, 1000.0]),
            }
        ),
    )
    def begin(
        self,
        sizes: list[int],
        kinds: list[str],
        pinned: bool,
        idle: float | None,
        devices: list[tuple[int, ...]],
        limits: dict[str, Any],
    ) -> None:
        kinds = ["pinned" if pinned else kinds[0], *kinds[1:]]
        specs = [
            _spec(n, s, 4.0, k, idle, d) for n, s, k, d in zip(NAMES, sizes, kinds, devices, strict=True)
        ]
        self.settings = HostSettings(memory=50, device_memory=40, backoff_s=3.0, **limits)
        self.core, self.now, self.count = Core(specs, self.settings), 0.0, 0
        self.outdated: set[str] = set()
        self.starting: set[str] = set()
        self.leaving: set[str] = set()
        self.replaced: set[str] = set()
        self.waiting: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.served: dict[str, list[int]] = {name: [] for name in NAMES}

    def tell(self, event: Event) -> None:
        for action in self.core.handle(event, self.now):
            self.obey(action)

    def obey(self, action: Action) -> None:
        match action:
            case StartModel(model):
                assert model not in self.starting | self.leaving
                self.starting.add(model)
            case ChangeTier(model):
                assert model not in self.running.values(), "somebody uses it"
                assert model not in self.leaving | self.starting
                assert not self.core.models[model].spec.pinned or model in self.outdated
                self.leaving.add(model)
            case ReplaceServer(model):
                assert self.core.models[model].state is ModelState.READY and not self.waiting
                self.replaced.add(model)
            case DispatchRequest(request, model):
                assert self.waiting.pop(request) == model and self.core.models[model].state in SERVING
                self.running[request] = model
                self.served[model].append(int(request))
            case RejectRequest(request, status):
                assert self.waiting.pop(request) and status in (429, 503, 504, 507)

    @rule(name=st.sampled_from(NAMES))
    def arrive(self, name: str) -> None:
        self.count += 1
        self.waiting[str(self.count)] = name
        self.tell(RequestArrived(str(self.count), name))

    @rule(seconds=st.floats(0.1, 15.0))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(50):
            if (due := self.core.deadline()) > end:
                break
            assert due > self.now or self.now == 0.0 or due == -inf, "the clock would stand still"
            self.now = max(self.now, due)
            self.tell(Tick())
        else:
            raise AssertionError("deadlines without end")
        self.now = end

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def start_ends(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(name)
        failed = ModelFailed(name, "no luck", has_external_cause=data.draw(st.booleans()))
        self.tell(failed if fails else ModelReady(name, 4.0))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def one_left(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        self.leaving.remove(name)
        self.tell(TierChanged(name))

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running | self.waiting, key=int)))
        self.running.pop(request, None)
        self.waiting.pop(request, None)
        self.tell(RequestEnded(request))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def server_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.running.values()))))
        self.running = {request: model for request, model in self.running.items() if model != name}
        self.tell(ModelFailed(name, "killed", has_external_cause=data.draw(st.booleans())))

    @rule(name=st.sampled_from(NAMES), is_replaceable=st.booleans())
    def server_is_outdated(self, name: str, is_replaceable: bool) -> None:
        self.outdated.add(name)
        self.tell(ServerOutdated(name, is_replaceable=is_replaceable))

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def replacement_ends(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.replaced)))
        self.replaced.remove(name)
        self.tell(ReplacementEnded(name))

    @invariant()
    def memory_adds_up(self) -> None:
        for memory in (self.core.residents.device, self.core.residents.host_memory):
            for place in memory.list_places():
                used = sum(memory.reserved_bytes(name, place) for name in NAMES)
                assert used == memory.limit(place) - memory.free(place) <= memory.limit(place)
        for name, model in self.core.models.items():
            if model.is_resident:
                held = model.observed.memory + model.replacement_bytes
                assert self.core.residents.device.reserved_bytes(name) == held or self.leaving

    @invariant()
    def order_is_kept(self) -> None:
        assert all(order == sorted(order) for order in self.served.values())

    @invariant()
    def limits_hold(self) -> None:
        models = self.core.models.values()
        assert sum(model.state is ModelState.STARTING for model in models) <= self.settings.loaders
        assert len(self.core.agenda.waiting) <= self.settings.max_held
        assert sorted(self.waiting) == sorted(w for w in self.waiting if w in self.core.agenda.waiting)

    def teardown(self) -> None:
        """Execute all orders and end all streams; every waiting request must then be answered."""
        if not hasattr(self, "core"):
            return
        for _ in range(2000):
            if not self.waiting:
                return
            if self.running:
                request = next(iter(self.running))
                del self.running[request]
                self.tell(RequestEnded(request))
            elif self.leaving:
                self.tell(TierChanged(self.leaving.pop()))
            elif self.starting:
                self.tell(ModelReady(self.starting.pop(), 4.0))
            else:
                self.now = max(self.now, self.core.deadline())
                assert self.now < inf, "they wait for nothing"
                self.tell(Tick())
        raise AssertionError(f"never answered: {self.waiting}")


TestHost = Host.TestCase
TestHost.settings = examples(60, stateful_step_count=30)
