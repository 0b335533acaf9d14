from collections.abc import Callable

import pytest
from tools.openai_server import FakeServer, running

from coldstart.lab.live import ReplaySettings, Target, replay
from coldstart.lab.traces import TraceRequest


def target(port: int) -> Target:
    return Target(f"http://127.0.0.1:{port}", "m", "key")


def no_signals(stop: Callable[[], None]) -> None:
    """Ignore signals, because a test must not replace the process's handlers."""


def trace(count: int, gap_s: float = 0.0, output: int = 3) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 20, output) for i in range(count)]


@pytest.mark.parametrize("mode", ["ok", "length"])
def test_every_token_is_timed_and_counted(mode: str) -> None:
    with running(FakeServer(mode)) as server:
        result = replay(trace(5, 0.01), [target(server.port)], ReplaySettings(), no_signals)
    assert result.ended == "complete"
    assert [record.number for record in result.records] == [0, 1, 2, 3, 4]
    for record in result.records:
        assert record.ok and record.output_tokens == 3
        assert (
            record.sent_s is not None and record.first_token_s is not None and record.finished_s is not None
        )
        assert record.due_s <= record.sent_s <= record.first_token_s <= record.finished_s
    assert server.bodies[0]["stream"] is True and server.bodies[0]["ignore_eos"] is True
    assert [len(body["prompt"]) for body in server.bodies] == [20] * 5  # type: ignore[arg-type]


def test_a_slow_server_does_not_slow_the_client() -> None:
    with running(FakeServer(gap_s=0.2)) as server:
        result = replay(trace(8, 0.01), [target(server.port)], ReplaySettings(), no_signals)
    first_end = min(record.finished_s or 0 for record in result.records)
    assert all((record.sent_s or 0) < first_end for record in result.records)
