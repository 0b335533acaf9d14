"""The one line on the pipe: when it is written, what the workers' accounts become, and a wrong token before anyone listens."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import GRAPHS_REPORT, KV_REPORT, EngineTask
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.vllm.engine.readiness import FALLBACK_PROMPT, Readiness

CANARY = {"prompt": [5, 6], "tokens": [7, 8]}


class Engine:
    """Answers every prompt with `token`, and calls of its workers from `answers` (an exception is raised)."""

    def __init__(self, token: int = 7, **answers: Any) -> None:
        self.token, self.answers, self.prompts = token, answers, list[list[int]]()
        self.tasks = ("generate",)
        self.later, self.together = [8], [9]

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def generate(self, prompt: Any, params: Any, _: str) -> AsyncIterator[Any]:
        assert params.temperature == 0.0
        self.prompts.append(prompt.prompt_token_ids)
        later = self.later if len(self.prompts) == 1 else self.together
        for n in range(1, params.max_tokens + 1):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[self.token, *later][:n])])

    async def collective_rpc(self, name: str) -> Any:
        if isinstance(answer := self.answers[name], Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two classes of vLLM's that a request is made of."""
    fake, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    monkeypatch.setattr(fake, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(inputs, "TokensPrompt", SimpleNamespace, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]] | None]]:
    """said(): the lines that the starter can read by now, None while the pipe is open and empty."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setenv(READY_FD_ENV, str(writer))

    def read() -> list[dict[str, Any]] | None:
        try:
            return [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
        except BlockingIOError:
            return None

    yield read
    os.close(reader)
    with suppress(OSError):
        os.close(writer)


Said = Callable[[], list[dict[str, Any]] | None]


def _run(awaited: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await awaited

    return asyncio.run(run())


def _report(said: Said, readiness: Readiness) -> dict[str, Any]:
    _run(readiness.listening())
    (report,) = said() or []
    assert said() == []  # closed: the starter does not wait for more
    return report


def test_a_wrong_token_is_said_before_anyone_listens(said: Said) -> None:
    readiness = Readiness(LaunchPlan([], canary=CANARY), Engine(9), worker_reports=False)
    assert READY_FD_ENV not in os.environ
    assert _run(readiness.proven()) is False
    (report,) = said() or []
    assert report["canary"] is False and report["tokens"] == [9]
    _run(readiness.listening())
    assert said() == []


def test_a_right_token_is_said_once_the_server_listens(said: Said) -> None:
    engine = Engine(7)
    readiness = Readiness(LaunchPlan([], canary=CANARY), engine, worker_reports=False)
    assert _run(readiness.proven()) is True and engine.prompts == [[5, 6]]
    assert said() is None
    report = _report(said, readiness)
    assert report == {"fast_path": {}, "fallbacks": [], "tokens": [7], "canary": True}
    _run(readiness.listening())  # as uvicorn does from time to time: neither a second line nor an error


GRAPHS = LaunchPlan([], canary=CANARY | {"batch": [7, 9]}, engine=EngineTask(restore=Path("/unpacked")))


@pytest.mark.parametrize(("later", "together"), [([8], [0]), ([0], [9])])
def test_a_wrong_later_token_of_restored_graphs_is_said_before_anyone_listens(
    said: Said, later: list[int], together: list[int]
) -> None:
    """The first token is a prefill's: alone it would let every wrong graph of a decode step pass."""
    engine = Engine(7, **{GRAPHS_REPORT: [{}]})
    engine.later, engine.together = later, together
    assert _run(Readiness(GRAPHS, engine, worker_reports=False).proven()) is False
    (report,) = said() or []
    assert report["canary"] is False and report["tokens"] == [7, *later]


def test_restored_graphs_answer_all_tokens_alone_and_in_a_batch(said: Said) -> None:
    engine = Engine(7, **{GRAPHS_REPORT: [{}]})
    readiness = Readiness(GRAPHS, engine, worker_reports=False)
    assert _run(readiness.proven()) is True and engine.prompts == [[5, 6]] * 5
    report = _report(said, readiness)
    assert report["canary"] is True and report["tokens"] == [7, 8]


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        ([None, None], []),
        (["999 bytes are free to rank 0"] * 2, ["999 bytes are free to rank 0"]),
        (RuntimeError("no such method"), ["the plug-in did not load: no such method"]),
    ],
)
def test_a_kv_size_that_was_not_applied_is_named(said: Said, answer: Any, reasons: list[str]) -> None:
    engine = Engine(**{KV_REPORT: answer})
    plan = LaunchPlan([], engine=EngineTask(kv_plan=[{"rank": 0}]))
    report = _report(said, Readiness(plan, engine, worker_reports=False))
    assert report["fallbacks"] == [{"section": "kv", "reason": reason} for reason in reasons]


def test_without_a_canary_some_token_is_proof_of_no_more_than_life(said: Said) -> None:
    engine = Engine(9)
    readiness = Readiness(LaunchPlan([]), engine, worker_reports=False)
    assert _run(readiness.proven()) is True and engine.prompts == [FALLBACK_PROMPT]
    report = _report(said, readiness)
    assert report["tokens"] == [9] and report["canary"] is None


def test_a_model_that_does_not_generate_is_asked_for_nothing(said: Said) -> None:
    engine = Engine()
    engine.tasks = ("embed",)
    readiness = Readiness(LaunchPlan([], canary=CANARY), engine, worker_reports=False)
    assert _run(readiness.proven()) is True and engine.prompts == []
    report = _report(said, readiness)
    assert report["tokens"] == [] and report["canary"] is None


def test_the_accounts_of_several_workers_become_one(said: Said) -> None:
    planned, slow = Fallback("kv", "planned"), {"section": "load", "reason": "files"}
    first = {"fast_path": {"compile": False, "kv": True}, "fallbacks": [slow], "load": {"way": "files"}}
    second = {"fast_path": {"compile": True, "x": True}, "fallbacks": [], "load": {"way": "prefetcher"}}
    for workers in ([first, second], [second, first]):
        plan = LaunchPlan([], fallbacks=[planned])
        report = _run(Readiness(plan, Engine(coldstart_report=workers), True)._report())
        # What one worker could not restore was not restored.
        assert report["fast_path"] == {"compile": False, "kv": True, "x": True}
        assert report["fallbacks"] == [planned.encode(), slow] and plan.fallbacks == [planned]
        assert report["loads"] == [worker["load"] for worker in workers]


def test_workers_that_cannot_be_asked_are_not(said: Said) -> None:
    engine = Engine(coldstart_report=RuntimeError("no such method"))
    assert "loads" not in _report(said, Readiness(LaunchPlan([]), engine, worker_reports=False))


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        ([{}], []),
        ([{}, {"8": "moved"}, {"8": "moved"}], ["8: moved"]),
        ([{"*": "another driver"}], ["all: another driver"]),
        (AttributeError("unknown"), ["the plug-in did not load: unknown"]),
    ],
)
def test_graphs_count_as_restored_when_no_worker_says_otherwise(
    said: Said, answer: Any, reasons: list[str]
) -> None:
    engine = Engine(**{GRAPHS_REPORT: answer})
    report = _report(
        said, Readiness(LaunchPlan([], engine=EngineTask(restore=Path("/unpacked"))), engine, False)
    )
    assert report["fast_path"] == {"graphs": not reasons}
    assert report["fallbacks"] == [{"section": "graphs", "reason": reason} for reason in reasons]


def test_collection_begins_once_it_serves_also_without_a_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(READY_FD_ENV, raising=False)
    readiness = Readiness(LaunchPlan([]), Engine(), worker_reports=False)
    gc.disable()
    try:
        _run(readiness.listening())
        assert gc.isenabled()
    finally:
        gc.enable()
