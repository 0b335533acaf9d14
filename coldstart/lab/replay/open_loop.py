"""Open-loop replay: every request leaves at its own time, whatever became of those before it.

Invariants: a request waits for nothing but the clock; an interrupted or aborted replay keeps what it
measured; the client's own lateness is part of every record; only requests under way are held in memory.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from coldstart.lab.replay.client import Target, prompt_tokens, send
from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.traces.request import TraceRequest

BALANCERS = ("round-robin", "least-outstanding", "random")
Keep = Callable[[RequestRecord], None]
DEAD_AFTER = 8
"""Requests in a row that could not even connect, after which the target counts as dead."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    seed: int = 0
    vocabulary: int = 1000
    timeout_s: float = 600.0
    balance: str = "round-robin"


@dataclass(slots=True)
class Replay:
    """Why it ended: 'complete', 'interrupted' or 'target dead', and the last error that a request met.

    The records are here in order of the trace, unless the replay was given somebody who keeps them.
    """

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    ended: str = "complete"
    error: str | None = None


class _Run:
    def __init__(self, targets: Sequence[Target], settings: ReplaySettings, keep: Keep | None) -> None:
        if settings.balance not in BALANCERS:
            raise ValueError(f"unknown balancing {settings.balance!r}; one of {', '.join(BALANCERS)}")
        self.targets, self.settings, self.replay = targets, settings, Replay()
        self.keep = keep or self.replay.records.append
        self.stop, self.refused, self.sent = asyncio.Event(), 0, 0
        self.random, self.outstanding = Random(settings.seed), [0] * len(targets)
        self.start = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self.start

    async def go(
        self, trace: Iterable[TraceRequest], interrupts: Callable[[Callable[[], None]], None]
    ) -> Replay:
        interrupts(lambda: self._end("interrupted"))
        running: set[asyncio.Task[None]] = set()
        for number, row in enumerate(trace):
            if await self._until(row.arrival_s):
                break
            task = asyncio.create_task(self._one(number, row))
            running.add(task)
            task.add_done_callback(running.discard)
        await self._drain(running)
        self.replay.duration_s = self.clock()
        self.replay.records.sort(key=lambda record: record.number)
        return self.replay

    async def _until(self, due_s: float) -> bool:
        """Sleep until it is time; True if the replay is over before."""
        delay = due_s - self.clock()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), max(0.0, delay))
        return self.stop.is_set()

    async def _one(self, number: int, row: TraceRequest) -> None:
        index = self._choose()
        record = RequestRecord(number, row.arrival_s, row.prompt_tokens, row.output_tokens, row.model)
        prompt = prompt_tokens(row, number, self.settings.seed, self.settings.vocabulary)
        self.outstanding[index] += 1
        try:
            connected = await send(self.targets[index], prompt, record, self.clock, self.settings.timeout_s)
        except asyncio.CancelledError:
            record.error, connected = "not finished when the replay ended", True
        finally:
            self.outstanding[index] -= 1
            self.keep(record)
        self._watch(record, connected)

    def _choose(self) -> int:
        count, self.sent = len(self.targets), self.sent + 1
        if self.settings.balance == "least-outstanding":
            return min(range(count), key=self.outstanding.__getitem__)
        if self.settings.balance == "random":
            return self.random.randrange(count)
        return (self.sent - 1) % count

    def _watch(self, record: RequestRecord, connected: bool) -> None:
        self.replay.error = record.error or self.replay.error
        self.refused = 0 if connected else self.refused + 1
        if self.refused >= DEAD_AFTER:
            self._end("target dead")

    def _end(self, why: str) -> None:
        if not self.stop.is_set():
            self.replay.ended = why
            self.stop.set()

    async def _drain(self, running: set[asyncio.Task[None]]) -> None:
        """Wait for the answers still on their way, unless the replay was stopped."""
        stopped = asyncio.create_task(self.stop.wait())
        while running and not self.stop.is_set():
            await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _on_sigint(stop: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)


def replay(
    trace: Iterable[TraceRequest],
    targets: Sequence[Target],
    settings: ReplaySettings,
    interrupts: Callable[[Callable[[], None]], None] = _on_sigint,
    keep: Keep | None = None,
) -> Replay:
    """Replay against running servers. Ctrl-C ends it and returns what was measured.

    `keep` is given every record when its request has ended; without it they are in the result.
    `interrupts` is given a function that stops the replay; tests pass their own. Raises ValueError for an
    unknown balancing or no target.
    """
    if not targets:
        raise ValueError("a replay needs at least one target")

    async def run() -> Replay:
        return await _Run(targets, settings, keep).go(trace, interrupts)

    return asyncio.run(run())
