"""Simulator of one server: vLLM's own scheduler on the virtual clock of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

from coldstart.errors import UsageError
from coldstart.lab.loop import Call, Loop, Timer
from coldstart.lab.plan import prompt_tokens
from coldstart.lab.records import Replay, RequestRecord
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.virtual_engine import EngineResources, VirtualEngine

VOCABULARY = 1 << 31


class EngineSimulator:
    """One server; `run` it once. `records` are in order of arrival."""

    def __init__(
        self, profile: IterationProfile, settings: SchedulerSettings, machine: EngineResources
    ) -> None:
        self.engine = VirtualEngine(profile, settings, machine, self._emit)
        self.records: list[RequestRecord] = []
        self._policy, self._loop = settings.policy, Loop()
        self._timer: Timer | None = None

    @property
    def now(self) -> float:
        """Return the time since the start of the trace in seconds."""
        return self._loop.now

    def run(self, rows: Iterable[TraceRequest]) -> list[RequestRecord]:
        """Replay rows in order of arrival.

        Raises:
            ValueError: The KV of a request never fits the device.
            UsageError: The scheduler cannot continue.
        """
        self._loop.run(self._arrivals(rows))
        if left := [record for record in self.records if record.finished_s is None]:
            raise self._deadlock(left)
        return self.records

    def _arrivals(self, rows: Iterable[TraceRequest]) -> Iterator[tuple[float, Call]]:
        for number, row in enumerate(rows):
            yield row.arrival_s, partial(self._arrive, number, row)

    def _arrive(self, number: int, row: TraceRequest) -> None:
        prompt = prompt_tokens(row, number, 0, VOCABULARY)
        self.engine.add(str(number), prompt, row.output_tokens)
        record = row.record(number, "simulated")
        record.sent_s = row.arrival_s
        self.records.append(record)
        if self.engine.idle:
            self._plan(self.now)

    def _plan(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.plan(time, self._step) if time < inf else None

    def _step(self) -> None:
        self._timer = None
        self._plan(self.engine.step(self.now))

    def _emit(self, name: str, tokens: int, ended: bool) -> None:
        record = self.records[int(name)]
        if tokens and record.first_token_s is None:
            record.first_token_s = self.now
        record.output_tokens += tokens
        if ended:
            record.finished_s = self.now

    def _deadlock(self, left: list[RequestRecord]) -> Exception:
        """Return the error of a scheduler that runs no request.

        Placement counts one block beyond the tokens of an evicted request, so one as large as the device may not return.
        """
        capacity = self.engine.machine.device_blocks
        blocks = max(self.engine.machine.blocks(one.prompt_tokens + one.wanted_tokens) for one in left)
        if blocks < capacity:
            return RuntimeError(f"the scheduler chose none of {len(left)} unfinished requests")
        return UsageError(
            f"{self._policy} cannot continue any of {len(left)} requests: one of them needs all {capacity} KV"
            " blocks of the device",
            hint=f"--kv-blocks {blocks + 1}, or shorter requests: --max-prompt, --max-output",
        )


def replay(
    rows: Iterable[TraceRequest],
    profile: IterationProfile,
    settings: SchedulerSettings,
    kv_blocks: int | None,
) -> Replay:
    """Replay on one server with `kv_blocks` on its device.

    Raises UsageError if a request never fits, or the scheduler cannot continue.
    """
    resources = EngineResources() if kv_blocks is None else EngineResources(device_blocks=kv_blocks)
    if settings.host_bytes is not None:
        resources = replace(resources, host_blocks=settings.host_bytes // resources.block_bytes)
    simulator = EngineSimulator(profile, settings, resources)
    try:
        return Replay(simulator.run(rows), simulator.now)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
