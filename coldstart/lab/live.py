"""Open-loop replay on an OpenAI-compatible server: each request is sent at its trace time, even if others are unfinished.

Invariants: a request waits only for its arrival time; an interrupted replay keeps its measurements; every record includes
the client's own delay. A prompt depends only on the trace row and the seed. Rows with equal hash_ids get equal tokens, so
that a replay exercises prefix caching as the recorded traffic did.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from coldstart.lab.plan import generate_prompt
from coldstart.lab.records import Replay, RequestRecord
from coldstart.lab.traces import TraceRequest
from coldstart.launch import completions

if TYPE_CHECKING:
    from aiohttp import ClientSession

MAX_FAILED_CONNECTIONS = 8
"""Consecutive failed connections after which the target is considered dead."""
MAX_LINE_BYTES = 1 << 20
VOCABULARY = 1000
"""Upper bound of the token ids in prompts; every model's vocabulary is larger."""


@dataclass(frozen=True, slots=True)
class Target:
    """Server under test: base URL, model name, API key, and timeout of a request in seconds.

    If `uses_row_model` is set, each request uses the model in its trace row instead of `model`. Raises ValueError if the URL
    is not http or https.
    """

    url: str
    model: str
    api_key: str | None = None
    uses_row_model: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.completions_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"invalid --target {self.url!r}: expected a URL that begins with http:// or https://"
            )

    @property
    def completions_url(self) -> str:
        """Return the URL of the completions endpoint."""
        base = self.url if "://" in self.url else f"http://{self.url}"
        return base.rstrip("/") + completions.COMPLETIONS


class _LiveReplay:
    def __init__(self, target: Target, seed: int, session: ClientSession) -> None:
        self.target, self.seed, self.session, self.replay = target, seed, session, Replay()
        self.failed_connections, self.start = 0, time.perf_counter()
        self._task: asyncio.Task[None] | None = None

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    async def run(self, trace: Iterable[TraceRequest]) -> Replay:
        self._task = asyncio.create_task(self._send_all(trace))
        with suppress(asyncio.CancelledError):  # by `stop`
            await self._task
        self.replay.duration_s = self.elapsed_s()
        self.replay.records.sort(key=lambda record: record.number)
        return self.replay

    def stop(self, reason: str) -> None:
        """Stop sending and cancel running requests. Only the first call's reason is recorded."""
        if self._task is not None and not self._task.cancelling():
            self.replay.end_reason = reason
            self._task.cancel()

    async def _send_all(self, trace: Iterable[TraceRequest]) -> None:
        async with asyncio.TaskGroup() as running:
            for number, row in enumerate(trace):
                await asyncio.sleep(max(0.0, row.arrival_s - self.elapsed_s()))
                running.create_task(self._send_one(number, row))

    async def _send_one(self, number: int, row: TraceRequest) -> None:
        record = row.create_record(number, self.target.url)
        prompt = generate_prompt(row, number, self.seed, VOCABULARY)
        connected = True
        try:
            connected = await self._send(prompt, record)
        except asyncio.CancelledError:
            record.error = "the response was not complete when the replay ended"
        self.replay.records.append(record)
        self.failed_connections = 0 if connected else self.failed_connections + 1
        if self.failed_connections >= MAX_FAILED_CONNECTIONS:
            self.stop("target dead")

    async def _send(self, prompt: list[int], record: RequestRecord) -> bool:
        """Stream one completion into `record`; return whether the server accepted the connection.

        Errors are stored in `record.error`, not raised.
        """
        import aiohttp

        target = self.target
        body = completions.build_request(
            prompt,
            record.wanted_tokens,
            stream=True,
            model=(record.model if target.uses_row_model else None) or target.model,
            usage=True,
        )
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        record.sent_s = self.elapsed_s()
        try:
            async with asyncio.timeout(target.timeout_s):
                async with self.session.post(target.completions_url, json=body, headers=headers) as response:
                    if response.status != 200:
                        record.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                        return True
                    async for line in response.content:
                        self._record_event(line, record)
        except aiohttp.ClientConnectorError as problem:
            record.error = f"cannot connect to {problem.host}:{problem.port}: {problem.os_error}"
            return False
        except TimeoutError:
            record.error = f"the response did not finish within {target.timeout_s:g} s"
        except aiohttp.ClientError as problem:
            record.error = f"the connection was lost during the response ({problem})"
        except (OSError, completions.ServerError, ValueError) as problem:
            record.error = f"{type(problem).__name__}: {problem}"
        if record.error is None and record.finished_s is None:
            record.error = "the response ended without a token"
        return True

    def _record_event(self, line: bytes, record: RequestRecord) -> None:
        """Record one server-sent event. Token counts reported by the server replace the number of chunks."""
        event = completions.parse_event(line)
        if event is None:
            return
        if event.has_choice:
            record.finished_s = now = self.elapsed_s()
            record.first_token_s = now if record.first_token_s is None else record.first_token_s
            record.output_tokens += 1
        record.output_tokens = event.usage.get("completion_tokens", record.output_tokens)
        record.prompt_tokens = event.usage.get("prompt_tokens", record.prompt_tokens)


def replay(trace: Iterable[TraceRequest], target: Target, seed: int = 0) -> Replay:
    """Replay a trace on a running server. SIGINT or SIGTERM stops it, and the measurements so far are returned."""

    async def run() -> Replay:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        # One connection per request: a connection left from an earlier response cannot delay it.
        connector, never = TCPConnector(limit=0, force_close=True), ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=never, read_bufsize=MAX_LINE_BYTES) as session:
            running = _LiveReplay(target, seed, session)
            for number, reason in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")):
                asyncio.get_running_loop().add_signal_handler(number, running.stop, reason)
            return await running.run(trace)

    return asyncio.run(run())
