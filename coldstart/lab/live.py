"""Open-loop replay on an OpenAI-compatible server: every request is sent at its own time, independent of earlier requests.

Invariants: a request waits only for the clock; an interrupted or aborted replay retains its measurements; the client's own
lateness is part of every record. The prompt depends only on the trace row and the seed, and equal hash_ids give equal
tokens, so that a replay exercises prefix caching as the recorded service did.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coldstart.lab.plan import prompt_tokens
from coldstart.lab.records import Replay, RequestRecord
from coldstart.lab.traces import TraceRequest
from coldstart.launch import completions

if TYPE_CHECKING:
    from aiohttp import ClientSession

DEAD_AFTER = 8
"""Number of consecutive failed connections after which the target counts as dead."""
MAX_LINE = 1 << 20
VOCABULARY = 1000
"""Token ids of prompts are below this, as in the vocabulary of every model."""


@dataclass(frozen=True, slots=True)
class Target:
    """One server: its base URL, model name and key, and the seconds of a request at most.

    With `by_row` a request names the model of its row instead of `model`. Raises ValueError for another URL than http or https.
    """

    url: str
    model: str
    api_key: str | None = None
    by_row: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"target {self.url!r} is not an http(s) URL")

    @property
    def address(self) -> str:
        """Return the URL of the completions endpoint."""
        base = self.url if "://" in self.url else f"http://{self.url}"
        return base.rstrip("/") + completions.COMPLETIONS


class _Run:
    def __init__(self, target: Target, seed: int, session: ClientSession) -> None:
        self.target, self.seed, self.session, self.replay = target, seed, session, Replay()
        self.refused, self.start = 0, time.perf_counter()
        self._task: asyncio.Task[None] | None = None

    def clock(self) -> float:
        return time.perf_counter() - self.start

    async def run(self, trace: Iterable[TraceRequest]) -> Replay:
        self._task = asyncio.create_task(self._send_all(trace))
        with suppress(asyncio.CancelledError):  # by `end`
            await self._task
        self.replay.duration_s = self.clock()
        self.replay.records.sort(key=lambda record: record.number)
        return self.replay

    def end(self, reason: str) -> None:
        """Send no further request and cancel the running ones. The first reason counts."""
        if self._task is not None and not self._task.cancelling():
            self.replay.ended = reason
            self._task.cancel()

    async def _send_all(self, trace: Iterable[TraceRequest]) -> None:
        async with asyncio.TaskGroup() as running:
            for number, row in enumerate(trace):
                await asyncio.sleep(max(0.0, row.arrival_s - self.clock()))
                running.create_task(self._send_one(number, row))

    async def _send_one(self, number: int, row: TraceRequest) -> None:
        record = row.record(number, self.target.url)
        prompt = prompt_tokens(row, number, self.seed, VOCABULARY)
        connected = True
        try:
            connected = await self._send(prompt, record)
        except asyncio.CancelledError:
            record.error = "not finished when the replay ended"
        self.replay.records.append(record)
        self.refused = 0 if connected else self.refused + 1
        if self.refused >= DEAD_AFTER:
            self.end("target dead")

    async def _send(self, prompt: list[int], record: RequestRecord) -> bool:
        """Stream one completion into `record`; return whether the server accepted the connection.

        Errors are stored in record.error and not raised.
        """
        import aiohttp

        target = self.target
        body = completions.build_request(
            prompt,
            record.wanted_tokens,
            stream=True,
            model=(record.model if target.by_row else None) or target.model,
            usage=True,
        )
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        record.sent_s = self.clock()
        try:
            async with asyncio.timeout(target.timeout_s):
                async with self.session.post(target.address, json=body, headers=headers) as response:
                    if response.status != 200:
                        record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                        return True
                    async for line in response.content:
                        self._read(line, record)
        except aiohttp.ClientConnectorError as problem:
            record.error = f"cannot connect to {problem.host}:{problem.port}: {problem.os_error}"
            return False
        except TimeoutError:
            record.error = f"the answer did not end within {target.timeout_s:g} s"
        except aiohttp.ClientError as problem:
            record.error = f"the connection was lost within an answer ({problem})"
        except (OSError, completions.ServerError, ValueError) as problem:
            record.error = f"{type(problem).__name__}: {problem}"
        if record.error is None and record.finished_s is None:
            record.error = "the answer ended without a token"
        return True

    def _read(self, line: bytes, record: RequestRecord) -> None:
        """Record one server-sent event. The server's usage, if reported, replaces the count of chunks."""
        event = completions.parse_event(line)
        if event is None:
            return
        if event.choice:
            record.finished_s = now = self.clock()
            record.first_token_s = now if record.first_token_s is None else record.first_token_s
            record.output_tokens += 1
        record.output_tokens = event.usage.get("completion_tokens", record.output_tokens)
        record.prompt_tokens = event.usage.get("prompt_tokens", record.prompt_tokens)


def _on_sigint(stop: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)


def replay(
    trace: Iterable[TraceRequest],
    target: Target,
    seed: int = 0,
    interrupts: Callable[[Callable[[], None]], None] = _on_sigint,
) -> Replay:
    """Replay against a running server, with prompts of this seed. Ctrl-C ends it and returns the measurements so far.

    `interrupts` receives a function that stops the replay; callers without a handler for signals pass their own.
    """

    async def run() -> Replay:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        # A new connection for each request: no server can slow a request by one of an earlier answer.
        connector, never = TCPConnector(limit=0, force_close=True), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=never, read_bufsize=MAX_LINE) as session:
            running = _Run(target, seed, session)
            interrupts(lambda: running.end("interrupted"))
            return await running.run(trace)

    return asyncio.run(run())
