"""The readiness line: its time, the merged reports of the workers, and a wrong token before the server listens."""

from __future__ import annotations

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

from coldstart.contract.graphs import COMPILE_REPORT, GRAPHS_REPORT, KV_REPORT, EngineTask
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.vllm.engine.readiness import Readiness

CANARY = {"prompt": [5, 6], "tokens": [7, 8]}


class Engine:
    """Fake engine that answers every prompt with `token` and calls of its workers with `answers` or exceptions."""

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


ReadLines = Callable[[], list[dict[str, Any]] | None]


def _run(awaited: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await awaited

    return asyncio.run(run())


def _report(read_lines: ReadLines, readiness: Readiness) -> dict[str, Any]:
    _run(readiness.listening())
    (report,) = read_lines() or []
    assert read_lines() == []  # closed: the starter does not wait longer
    return report


def test_wrong_token_is_reported_before_the_server_listens(read_lines: ReadLines) -> None:
    readiness = Readiness(LaunchPlan([], canary=CANARY), Engine(9), worker_reports=False)
    assert READY_FD_ENV not in os.environ
    assert _run(readiness.proven()) is False
    (report,) = read_lines() or []
    assert report["canary"] is False and report["tokens"] == [9]
    _run(readiness.listening())
    assert read_lines() == []


GRAPHS = LaunchPlan([], canary=CANARY | {"batch": [7, 9]}, engine=EngineTask(restore=Path("/unpacked")))


def test_wrong_later_token_of_restored_graphs_is_reported_before_listening(read_lines: ReadLines) -> None:
    """The first token comes from a prefill and would not detect a wrong decode graph."""
    engine = Engine(7, **{GRAPHS_REPORT: [{}]})
    engine.later = [0]
    assert _run(Readiness(GRAPHS, engine, worker_reports=False).proven()) is False
    (report,) = read_lines() or []
    assert report["canary"] is False and report["tokens"] == [7, 0]


def test_near_tied_tokens_that_swap_in_a_batch_do_not_fail_the_start(
    read_lines: ReadLines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(7, **{GRAPHS_REPORT: [{}]})
    engine.together = [0]  # alone 8 is best; in a batch the other one of the two
    readiness = Readiness(GRAPHS, engine, worker_reports=False)
    assert _run(readiness.proven()) is True
    assert "in a batch of 4 the tokens differ" in caplog.text
    assert _report(read_lines, readiness)["canary"] is True


def test_restored_graphs_answer_all_tokens_alone_and_in_a_batch(read_lines: ReadLines) -> None:
    engine = Engine(7, **{GRAPHS_REPORT: [{}]})
    readiness = Readiness(GRAPHS, engine, worker_reports=False)
    assert _run(readiness.proven()) is True and engine.prompts == [[5, 6]] * 5
    report = _report(read_lines, readiness)
    assert report["canary"] is True and report["tokens"] == [7, 8]


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        ([None, None], []),
        (["999 bytes are free to rank 0"] * 2, ["999 bytes are free to rank 0"]),
        (RuntimeError("no such method"), ["the plug-in did not load: no such method"]),
    ],
)
def test_a_kv_size_that_was_not_applied_is_named(
    read_lines: ReadLines, answer: Any, reasons: list[str]
) -> None:
    engine = Engine(**{KV_REPORT: answer})
    plan = LaunchPlan([], engine=EngineTask(kv_plan=[{"rank": 0}]))
    report = _report(read_lines, Readiness(plan, engine, worker_reports=False))
    assert report["fallbacks"] == [{"section": "kv", "reason": reason} for reason in reasons]


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
    read_lines: ReadLines, answer: Any, reasons: list[str]
) -> None:
    engine = Engine(**{GRAPHS_REPORT: answer})
    report = _report(
        read_lines, Readiness(LaunchPlan([], engine=EngineTask(restore=Path("/unpacked"))), engine, False)
    )
    assert report["fast_path"] == {"graphs": not reasons}
    assert report["fallbacks"] == [{"section": "graphs", "reason": reason} for reason in reasons]


@pytest.mark.parametrize(
    ("folder", "loaded", "reasons", "expected"),
    [
        ("aot", 1, [], []),
        ("aot", 0, [], ["vLLM requested no ahead-of-time artifact"]),
        ("triton", 0, [], []),  # with `-cc.mode=0` vLLM never looks for an artifact
        ("triton", 0, ["rank_0_0: the bundle has 0 artifacts"], ["rank_0_0: the bundle has 0 artifacts"]),
    ],
)
def test_an_artifact_must_be_loaded_only_if_the_section_contains_one(
    read_lines: ReadLines, tmp_path: Path, folder: str, loaded: int, reasons: list[str], expected: list[str]
) -> None:
    (tmp_path / folder).mkdir()
    engine = Engine(**{COMPILE_REPORT: [{"loaded": loaded, "reasons": reasons}]})
    plan = LaunchPlan([], engine=EngineTask(compiled=tmp_path / "aot"))
    report = _report(read_lines, Readiness(plan, engine, worker_reports=False))
    assert report["fast_path"] == {"compile": not expected}
    assert [one["reason"] for one in report["fallbacks"]] == expected
