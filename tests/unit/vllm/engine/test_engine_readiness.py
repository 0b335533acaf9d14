"""The readiness line: its time, the merged reports of the workers, and a wrong token before the server listens."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import WORKER_REPORT, EngineTask
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.vllm.engine.readiness import SPAWNED, Readiness

CANARY = {"prompt": [5, 6], "tokens": [7, 8]}


class Engine:
    """Fake engine that answers every prompt with `token` and calls of its workers with `answers` or exceptions."""

    def __init__(self, token: int = 7, **answers: Any) -> None:
        self.token, self.answers, self.prompts = token, answers, list[list[int]]()
        self.tasks = ("generate",)
        self.later = [8]

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    async def generate(self, prompt: Any, params: Any, _: str) -> AsyncIterator[Any]:
        assert params.temperature == 0.0
        self.prompts.append(prompt.prompt_token_ids)
        for n in range(1, params.max_tokens + 1):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[self.token, *self.later][:n])])

    async def collective_rpc(self, name: str) -> Any:
        if isinstance(answer := self.answers[name], Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two classes of vLLM that form a request."""
    fake, inputs = ModuleType("vllm"), ModuleType("vllm.inputs")
    monkeypatch.setattr(fake, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(inputs, "TokensPrompt", SimpleNamespace, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)


@pytest.fixture
def read_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]] | None]]:
    """Return a function for the lines that the starter can read, or None while the pipe is open and empty."""
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


def _answer(section: str = "", *reasons: str) -> dict[str, Any]:
    """Return the report of one worker."""
    named = [{"section": section, "reason": reason} for reason in reasons]
    return {"fast_path": dict.fromkeys([section] if reasons else [], False), "fallbacks": named, "load": {}}


ReadLines = Callable[[], list[dict[str, Any]] | None]


def _run(awaited: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await awaited

    return asyncio.run(run())


def _report(read_lines: ReadLines, readiness: Readiness) -> dict[str, Any]:
    _run(readiness.report_ready())
    (report,) = read_lines() or []
    assert read_lines() == []  # closed: the starter does not wait longer
    return report


GRAPHS = LaunchPlan([], canary=CANARY, engine=EngineTask(restore=Path("/unpacked")))


@pytest.mark.parametrize(("plan", "tokens"), [(LaunchPlan([], canary=CANARY), [9]), (GRAPHS, [7, 0])])
def test_wrong_token_is_reported_before_the_server_listens(
    read_lines: ReadLines, plan: LaunchPlan, tokens: list[int]
) -> None:
    """Of restored graphs, the first token comes from a prefill and would not detect a wrong decode graph."""
    engine = Engine(tokens[0], **{WORKER_REPORT: [_answer()]})
    engine.later = tokens[1:]
    readiness = Readiness(plan, engine, has_reporting_workers=False)
    assert READY_FD_ENV not in os.environ
    assert _run(readiness.check_canary()) is False
    (report,) = read_lines() or []
    assert report["canary"] is False and report["tokens"] == tokens
    _run(readiness.report_ready())
    assert read_lines() == []


def test_restored_graphs_answer_all_tokens(read_lines: ReadLines) -> None:
    engine = Engine(7, **{WORKER_REPORT: [_answer()]})
    readiness = Readiness(GRAPHS, engine, has_reporting_workers=False)
    assert _run(readiness.check_canary()) is True and engine.prompts == [[5, 6]]
    report = _report(read_lines, readiness)
    assert report["canary"] is True and report["tokens"] == [7, 8]


SECTIONS = {
    "compile": EngineTask(compiled=Path("/unpacked")),
    "kv": EngineTask(kv_plan=[{"rank": 0}]),
    "graphs": EngineTask(restore=Path("/unpacked")),
}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("reasons", "named"),
    [
        ([[], []], []),
        ([["moved"], ["moved", "gone"]], ["moved", "gone"]),
        (RuntimeError("no such method"), ["the plug-in did not load: no such method"]),
    ],
)
def test_a_requested_section_counts_as_used_when_no_worker_says_otherwise(
    read_lines: ReadLines, section: str, reasons: Any, named: list[str]
) -> None:
    given = [_answer(section, *of) for of in reasons] if isinstance(reasons, list) else reasons
    plan = LaunchPlan([], engine=SECTIONS[section])
    report = _report(
        read_lines, Readiness(plan, Engine(**{WORKER_REPORT: given}), has_reporting_workers=False)
    )
    assert report["fast_path"] == {section: not named} and "loads" not in report
    assert report["fallbacks"] == [{"section": section, "reason": reason} for reason in named]


@pytest.mark.parametrize(
    ("ranks", "is_forked", "reasons"),
    [
        ([12.34, 0.0], True, [SPAWNED.format(12.34)]),
        ([0.0, 0.0], True, []),
        ([12.34], False, []),
        (RuntimeError("no such method"), True, ["the plug-in did not load: no such method"]),
    ],
)
def test_spawned_rank_is_reported_with_the_seconds_of_its_imports(
    read_lines: ReadLines, ranks: Any, is_forked: bool, reasons: list[str]
) -> None:
    given = [_answer() | {"import_s": one} for one in ranks] if isinstance(ranks, list) else ranks
    engine = Engine(**{WORKER_REPORT: given})
    report = _report(read_lines, Readiness(LaunchPlan([]), engine, False, is_forked=is_forked))
    assert report["fallbacks"] == [{"section": "engine", "reason": reason} for reason in reasons]
    assert report["fast_path"] == {}
