import asyncio
from collections.abc import Callable

import pytest
from tools.openai_server import FakeServer, running

from coldstart.lab.live import Target, replay
from coldstart.lab.traces import TraceRequest


def target(port: int, timeout_s: float = 60.0) -> Target:
    return Target(f"http://127.0.0.1:{port}", "m", "key", timeout_s=timeout_s)


def no_signals(stop: Callable[[], None]) -> None:
    """Ignore signals, because a test must not replace the process's handlers."""


def trace(count: int, gap_s: float = 0.0, output: int = 3) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 20, output) for i in range(count)]


@pytest.mark.parametrize("mode", ["ok", "length"])
def test_every_token_is_timed_and_counted(mode: str) -> None:
    with running(FakeServer(mode)) as server:
        result = replay(trace(5, 0.01), target(server.port), register_interrupt=no_signals)
    assert result.end_reason == "complete"
    assert [record.number for record in result.records] == [0, 1, 2, 3, 4]
    for record in result.records:
        assert record.ok and record.output_tokens == 3
        assert (
            record.sent_s is not None and record.first_token_s is not None and record.finished_s is not None
        )
        assert record.due_s <= record.sent_s <= record.first_token_s <= record.finished_s
    assert server.bodies[0]["stream"] is True and server.bodies[0]["ignore_eos"] is True
    assert [len(body["prompt"]) for body in server.bodies] == [20] * 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "words"),
    [("error", "429"), ("cut", "the connection was lost"), ("hang", "did not finish within 0.3 s")],
)
def test_a_failing_request_is_recorded_not_raised(mode: str, words: str) -> None:
    with running(FakeServer(mode)) as server:
        server_target = target(server.port, 0.3 if mode == "hang" else 60.0)
        result = replay(trace(2), server_target, register_interrupt=no_signals)
    assert all(record.error and words in record.error and not record.ok for record in result.records)


def test_an_interrupt_keeps_what_was_measured() -> None:
    def soon(stop: Callable[[], None]) -> None:
        after = stop if server.answered > 2 else lambda: soon(stop)
        asyncio.get_running_loop().call_later(0.25, after)

    with running(FakeServer()) as server:
        result = replay(trace(10_000, 0.02), target(server.port), register_interrupt=soon)
    assert result.end_reason == "interrupted"
    assert 0 < sum(record.ok for record in result.records) <= len(result.records) < 10_000
