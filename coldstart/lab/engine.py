"""Simulator of one server, which runs vLLM's own scheduler on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from coldstart.errors import UsageError
from coldstart.lab.loop import Call, EventLoop, Timer
from coldstart.lab.plan import generate_prompt
from coldstart.lab.records import Replay, RequestRecord
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.virtual_engine import EngineResources, VirtualEngine

VOCABULARY = 1 << 31


class EngineSimulator:
    """Simulator of one server, for a single call of `run`. `records` are in order of arrival."""

    def __init__(
        self, profile: IterationProfile, settings: SchedulerSettings, resources: EngineResources
    ) -> None:
        self.engine = VirtualEngine(profile, settings, resources, self._on_output)
        self.records: list[RequestRecord] = []
        self._loop, self._step_timer = EventLoop(), Timer()

    @property
    def now(self) -> float:
        """Return the time since the start of the trace in seconds."""
        return self._loop.now

    def run(self, rows: Iterable[TraceRequest]) -> list[RequestRecord]:
        """Replay requests, which must be in order of arrival, and return their records.

        Raises:
            ValueError: A request needs more KV blocks than the device has.
        """
        self._loop.run(self._arrivals(rows))
        assert all(record.finished_s is not None for record in self.records), "the scheduler left a request"
        return self.records

    def _arrivals(self, rows: Iterable[TraceRequest]) -> Iterator[tuple[float, Call]]:
        for index, row in enumerate(rows):
            yield row.arrival_s, partial(self._on_arrival, index, row)

    def _on_arrival(self, index: int, row: TraceRequest) -> None:
        prompt = generate_prompt(row, index, 0, VOCABULARY)
        self.engine.add_request(str(index), prompt, row.output_tokens)
        record = row.create_record(index, "simulated")
        record.sent_s = row.arrival_s
        self.records.append(record)
        if self.engine.is_idle:
            self._schedule_step(self.now)

    def _schedule_step(self, time: float) -> None:
        self._step_timer.cancel()
        if time < inf:
            self._step_timer = self._loop.call_at(time, self._step)

    def _step(self) -> None:
        self._schedule_step(self.engine.step(self.now))

    def _on_output(self, name: str, tokens: int, ended: bool) -> None:
        record = self.records[int(name)]
        if tokens and record.first_token_s is None:
            record.first_token_s = self.now
        record.output_tokens += tokens
        if ended:
            record.finished_s = self.now


def replay(
    rows: Iterable[TraceRequest],
    profile: IterationProfile,
    settings: SchedulerSettings,
    kv_blocks: int | None,
) -> Replay:
    """Replay requests on one simulated server with `kv_blocks` KV blocks on its device.

    Raises UsageError if a request needs more KV blocks.
    """
    resources = EngineResources() if kv_blocks is None else EngineResources(device_blocks=kv_blocks)
    if settings.host_bytes is not None:
        resources = replace(resources, host_blocks=settings.host_bytes // resources.block_bytes)
    simulator = EngineSimulator(profile, settings, resources)
    try:
        return Replay(simulator.run(rows), simulator.now)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
