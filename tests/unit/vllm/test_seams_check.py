"""The check of vLLM's names: what is missing or changed is named, nothing is imported, and a second start looks no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from coldstart.vllm import seams
from coldstart.vllm.seams import source_tree
from coldstart.vllm.seams.fit import problems
from coldstart.vllm.seams.seam import Seam, seam
from coldstart.vllm.seams.source_tree import Sources
from coldstart.vllm.seams.table import TABLE

SOURCE = """
from abc import abstractmethod
from .base import Base, helper
from .more import *

LIMIT: int = 3

class Kind(Base):
    field: int
    def __init__(self, config, rank=0, *, name=None):
        self.config, (self.one, self.two) = config, (1, 2)
    def step(self, tokens, *, fast): ...
    @property
    def size(self): ...
    async def wait(self): ...

if LIMIT:
    def optional(a, b=1): ...
"""
BASE = """
class Base:
    def __init__(self): self.inherited = {}
    @abstractmethod
    def must(self): ...
    def rest(self, *args, **kwargs): ...
def helper(x): return "a text that is there"
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A small vLLM."""
    package = tmp_path / "vllm" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "__init__.py").write_text(SOURCE)
    (package / "base.py").write_text(BASE)
    (package / "more.py").write_text("def starred(): ...\n")
    (package / "broken.py").write_text("def :\n")
    return Sources(tmp_path)


@pytest.mark.parametrize(
    "fits",
    [
        seam("start", "engine"),
        seam("start", "engine.base:Base"),
        seam("start", "engine:Kind", "Kind(config)", reads="field config one two size inherited wait must"),
        seam("start", "engine:Kind", "Kind(config, rank, *, name)", calls=("step(self, tokens, *, fast)",)),
        seam("start", "engine:Kind", calls=("rest(self, anything, *, at_all)",)),
        seam("start", "engine:Kind", overrides=("step(self, tokens, *, fast)", "must(self)")),
        seam("start", "engine:Kind", overrides=("step(self, *args, **kwargs)", "must(self)")),
        seam("start", "engine:Kind.step", "step(self, tokens, *args)"),
        seam("start", "engine:helper", "helper(x)", says=("a text that is there",)),
        seam("start", "engine:optional", "optional(a)"),
        seam("start", "engine:starred", "starred()"),
    ],
    ids=lambda one: f"{one.name}{one.call or one.calls or one.overrides}",
)  # fmt: skip
def test_what_fits_is_no_problem(sources: Sources, fits: Seam) -> None:
    assert list(problems(fits, sources)) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (seam("start", "gone"), "no module vllm.gone"),
        (seam("start", "engine:Gone"), "no vllm.engine:Gone"),
        (seam("start", "engine:Kind.gone"), "no vllm.engine:Kind.gone"),
        (seam("start", "engine.broken"), "cannot be read"),
        (seam("start", "engine:Kind", reads="field gone"), "has no gone"),
        (seam("start", "engine:Kind", "Kind()"), r"takes \(config, rank, name=\), expected \(\)"),
        (seam("start", "engine:Kind", "Kind(settings)"), "takes"),
        (seam("start", "engine:Kind", "Kind(config, *, colour)"), "takes"),
        (seam("start", "engine:Kind", calls=("step(self, tokens)",)), r"step takes .*fast="),
        (seam("start", "engine:Kind", overrides=("step(self, tokens)", "must(self)")), "step takes"),
        (seam("start", "engine:Kind", overrides=("step(self, tokens, more, *, fast)", "must(self)")), "step takes"),
        (seam("start", "engine:Kind", overrides=("step(self, tokens, *, fast)",)), "wants must"),
        (seam("start", "engine:helper", "helper(x, y)"), "takes"),
        (seam("start", "engine:helper", says=("another text",)), "does not say 'another text'"),
        (seam("start", "engine:LIMIT", reads="x"), "is no class"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_what_changed_is_named(sources: Sources, changed: Seam, words: str) -> None:
    assert re.search(words, "; ".join(problems(changed, sources)))


@pytest.fixture
def small(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The small vLLM is the installed one."""
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(seams, "_root", lambda: tmp_path)
    seams.check.cache_clear()
    yield tmp_path
    seams.check.cache_clear()


def test_a_strange_vllm_is_a_reason_for_every_feature_and_never_imported(small: Path) -> None:
    before = set(sys.modules)
    reasons = {feature: seams.check(feature) for feature in ("start", "weights", "graphs", "stock")}
    assert all(reason and reason.endswith(".") for reason in reasons.values())
    assert "vllm.v1.engine.async_llm" in str(reasons["start"]) and "weights" in str(reasons["weights"])
    assert not any(name.startswith("vllm.engine") for name in set(sys.modules) - before)


def test_an_answer_stands_on_the_files_of_its_own_feature(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a change of any file that an earlier feature has read would have every later one looked up again."""
    tables = {
        "start": [seam("start", "engine.base:helper", "helper(x)")],
        "stock": [seam("stock", "engine.more:starred", "starred()")],
    }
    monkeypatch.setattr("coldstart.vllm.seams.table.seams_for", tables.__getitem__)
    _, first = seams._looked_up("start", small)
    _, second = seams._looked_up("stock", small)
    assert [path.name for path in second if path.name == "base.py"] == [] and "base.py" in {
        path.name for path in first
    }


def test_the_answer_is_kept_until_a_file_changes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "_sources", Sources)
    monkeypatch.setattr(
        "coldstart.vllm.seams.table.seams_for", lambda _: [seam("stock", "engine:Kind", reads="field")]
    )
    assert seams.check("stock") is None
    seams.check.cache_clear()
    with monkeypatch.context() as blind:
        blind.setattr(source_tree.Module, "tree", property(lambda _: pytest.fail("parsed again")))
        assert seams.check("stock") is None
    file = small / "vllm" / "engine" / "__init__.py"
    file.write_text(SOURCE.replace("field", "meadow"))
    seams.check.cache_clear()
    assert "has no field" in str(seams.check("stock"))
    file.unlink()
    seams.check.cache_clear()
    assert "no module" in str(seams.check("stock"))
    file.write_text(SOURCE)
    seams.check.cache_clear()
    assert seams.check("stock") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"stock": 3}',
        '{"stock": {"reason": null, "files": {}}}',
        '{"stock": {"files": {"a": 1}}}',
    ],
)
def test_a_damaged_memory_is_made_again(small: Path, text: str) -> None:
    assert seams.check("stock")
    (kept,) = (small / "cache" / "seams").iterdir()
    kept.write_text(text)
    seams.check.cache_clear()
    assert seams.check("stock")


def test_no_place_to_keep_it_is_no_error(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / "occupied").write_text("")
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(small / "occupied"))
    assert "no module" in str(seams.check("stock"))


def test_whatever_goes_wrong_is_a_reason(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "_root", lambda: 1 / 0)
    assert "could not be looked through: ZeroDivisionError" in str(seams.check("start"))
    seams.check.cache_clear()
    monkeypatch.setattr(seams, "_root", lambda: None)
    assert seams.check("start") == "vLLM is not installed."


def test_graphs_want_a_version_that_was_read(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldstart.vllm.seams.table.seams_for", lambda _: [])
    assert seams.drift(small, "0.32.5+cpu")["graphs"] == []
    for version in ("0.31.0", "0.33.0", "unknown"):
        assert "not read" in seams.drift(small, version)["graphs"][0]


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """The installed vLLM's own sources, every name of the table called something else in them."""
    spec = find_spec("vllm")
    assert spec and spec.submodule_search_locations
    root, place = Path(spec.submodule_search_locations[0]).parent, tmp_path_factory.mktemp("renamed")
    found = Sources(root)
    for one in TABLE:
        list(problems(one, found))
    names = {part for one in TABLE for part in (*one.path.split("."), *one.members)} - {
        "",
        "__init__",
        "_policy",
    }
    words = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
    for file in filter(Path.is_file, found.read):
        target = place / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        # A keyword of Python's or a name of the language's is none of these, so the result still parses.
        target.write_text(words.sub(r"\1_of_old", file.read_text()))
    return Sources(place)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "one", [one for one in TABLE if one.path], ids=lambda one: f"{one.name} {'-'.join(one.features)}"
)
def test_each_name_is_missed_when_vllm_calls_it_something_else(renamed: Sources, one: Seam) -> None:
    assert list(problems(one, renamed))


def test_a_kept_answer_reads_no_source(tmp_path: Path) -> None:
    """What every start pays: no parser, no table."""
    code = (
        "import sys; from coldstart.vllm import seams; seams.check('stock');"
        "print([m for m in ('coldstart.vllm.seams.source_tree', 'coldstart.vllm.seams.table', 'vllm') if m in sys.modules])"
    )
    environment = {**os.environ, "COLDSTART_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert said[1].strip() == "[]"
