"""Conditions under which a stream continues at the next server of its model."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from coldstart.host.live import resumption
from coldstart.host.live.resumption import END_S, await_end, is_aborted
from coldstart.host.live.upstream import Replica, Upstream
from coldstart.host.model_state import Model, State
from coldstart.host.specification import ModelSpec


def _replica() -> Replica:
    return Replica("a", Upstream(Path("/nowhere.sock")))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(resumption, "LOOK_S", 0.0)
    return Model(ModelSpec.simple("a", 10, 5.0))


def test_await_end_waits_until_the_server_has_ended(model: Model) -> None:
    residences = {"a": (broken := _replica())}
    looks: list[float] = []

    def clock() -> float:
        looks.append(0.0)
        if len(looks) == 5:
            del residences["a"]
        return 0.0

    assert asyncio.run(await_end(broken, {"a": model}, residences, clock)) and len(looks) >= 5


def test_await_end_gives_up_when_the_server_does_not_end_in_time(model: Model) -> None:
    broken, clock = _replica(), count(0.0, END_S / 10)
    assert not asyncio.run(await_end(broken, {"a": model}, {"a": broken}, lambda: next(clock)))


def test_await_end_refuses_a_model_that_is_no_longer_configured() -> None:
    assert not asyncio.run(await_end(_replica(), {}, {}, lambda: 0.0))


def test_await_end_waits_for_the_backoff_of_a_failed_start(model: Model) -> None:
    model.state, model.retry_at = State.FAILED, 2.0
    clock = count(0.0, 0.5)
    assert asyncio.run(await_end(_replica(), {"a": model}, {}, lambda: next(clock)))
    assert next(clock) > 2.0


@pytest.mark.parametrize(
    ("answer", "aborted"),
    [
        (b'{"choices": [{"finish_reason": "abort"}]}', True),
        (b'{"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}', True),
        (b'{"choices": [{"finish_reason": "stop", "text": "\\"abort\\""}]}', False),
        (b'{"choices": [{"text": "abort", "finish_reason": "abort"', False),
        (b'{"choices": ["abort"]}', False),
        (b'{"choices": null, "id": "abort"}', False),
        (b'["abort"]', False),
        (b"", False),
    ],
)
def test_is_aborted_reads_the_finish_reasons_of_a_complete_answer(answer: bytes, aborted: bool) -> None:
    assert is_aborted(answer) is aborted
