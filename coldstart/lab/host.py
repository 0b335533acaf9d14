"""Host simulator: replays requests for many models on the live host's own core, in simulated time.

Model: a start takes the penalty of its tier, and an eviction takes no time. A request occupies its model for
`service_s` seconds from its dispatch; requests do not slow each other (vLLM batches them). A busy model is not evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coldstart.host import events
from coldstart.host.core import Core
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.loop import EventLoop
from coldstart.lab.records import Replay, SimulatedRequest


def simulate(
    requests: Iterable[SimulatedRequest], specs: Iterable[ModelSpec], settings: HostSettings
) -> Replay:
    """Replay requests, which must be in order of arrival.

    The count `start_s` is the total duration of all starts in seconds, which is the cost that a policy minimizes.
    """
    return _Host(Core(specs, settings)).replay(requests)


class _Host:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.requests: list[SimulatedRequest] = []
        self.outcome = Replay()
        self._loop = EventLoop(core.deadline, lambda: self._handle_event(events.Tick()))
        self._total_start_s, self._peak_bytes = 0.0, 0

    def replay(self, requests: Iterable[SimulatedRequest]) -> Replay:
        self._loop.run((request.arrival_s, partial(self._on_arrival, request)) for request in requests)
        self.outcome.duration_s = max((one.finished_s or 0.0 for one in self.outcome.records), default=0.0)
        self.outcome.counts = {
            "policy": self.core.settings.policy,
            "starts": self.core.starts,
            "departures": self.core.departures,
            "start_s": self._total_start_s,
            "peak_memory_bytes": self._peak_bytes,
        }
        return self.outcome

    def _on_arrival(self, request: SimulatedRequest) -> None:
        record = request.create_record(len(self.requests))
        self.requests.append(request)
        self.outcome.records.append(record)
        hits = self.core.hits
        self._handle_event(events.RequestArrived(str(record.number), request.model))
        record.cold = self.core.hits == hits

    def _handle_event(self, event: events.Event) -> None:
        now = self._loop.now
        for action in self.core.handle(event, now):
            self._execute(action, now)
        self._peak_bytes = max(self._peak_bytes, self.core.residents.device.used)

    def _execute(self, action: events.Action, now: float) -> None:
        match action:
            case events.StartModel(model):
                seconds = action.tier.penalty_s
                self._total_start_s += seconds
                self._schedule_event(seconds, events.ModelReady(model, seconds))
            case events.ChangeTier(model):
                self._schedule_event(0.0, events.TierChanged(model))
            case events.DispatchRequest(name):
                request, record = self.requests[int(name)], self.outcome.records[int(name)]
                record.sent_s, record.output_tokens = now, request.tokens
                record.first_token_s, record.finished_s = now + request.prefill_s, now + request.service_s
                self._schedule_event(request.service_s, events.RequestEnded(name))
            case events.RejectRequest(name, status, reason):
                self.outcome.records[int(name)].error = f"HTTP {status}: {reason}"

    def _schedule_event(self, seconds: float, event: events.Event) -> None:
        self._loop.call_at(self._loop.now + seconds, partial(self._handle_event, event))
