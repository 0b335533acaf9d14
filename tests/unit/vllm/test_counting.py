"""Hooks that count: they report what vLLM's loops do, and change nothing when vLLM's objects differ."""

from __future__ import annotations

import sys
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.progress_pipe import pipe
from tqdm import tqdm

from coldstart.system.start_progress import KEY, LineReader, StartProgress
from coldstart.vllm import counting

__all__ = ["pipe"]


def read(pipe: int) -> list[str]:
    return [StartProgress.parse(line[KEY]).describe() for line in LineReader(pipe).read() or ()]


def test_bar_reports_its_items_unless_vllm_disables_it(pipe: int) -> None:
    module: Any = SimpleNamespace(tqdm=tqdm)
    counting._count_bars("load weights", "shards", module)
    assert list(module.tqdm("abc", disable=True)) == ["a", "b", "c"] and read(pipe) == []
    assert list(module.tqdm("abc", file=StringIO())) == ["a", "b", "c"]
    assert list(module.tqdm(iter("abc"), file=StringIO())) == ["a", "b", "c"]
    assert read(pipe) == ["load weights: 0 of 3 shards", "load weights: 3 of 3 shards"]


def test_steps_of_the_first_rank_are_reported(pipe: int) -> None:
    class Worker:
        rank = 0

        def load_model(self) -> str:
            return "loaded"

    module: Any = SimpleNamespace(Worker=Worker)
    counting._name_steps("Worker", module)
    assert Worker().load_model() == "loaded" and read(pipe) == ["load the model"]
    second = Worker()
    second.rank = 1
    assert second.load_model() == "loaded" and read(pipe) == []


def test_module_that_cannot_be_counted_is_imported_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("uncounted")
    module.tqdm = bar = lambda items: items  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uncounted", module)
    counting._hook("uncounted", lambda module: counting._count_bars("load weights", "shards", module))
    assert module.tqdm is bar
