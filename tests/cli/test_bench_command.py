"""coldstart bench over fake servers: results on stdout, reports in files, exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands._export import ExportTargets
from support import pages
from support.fake_launcher import FakeLauncher
from tools.command_line import main

from coldstart.bench import benchmark
from coldstart.bench.report import FORMATS, Report
from coldstart.validate.launch import Launcher
from coldstart.validate.launchers import ModelUnderTest

BEHAVIOUR: dict[str, str] = {}


def fakes(subject: ModelUnderTest, modes: Sequence[str], work: Path) -> list[Launcher]:
    return [FakeLauncher(mode, BEHAVIOUR.get(mode, "serves")) for mode in modes]


@pytest.fixture(autouse=True)
def replace_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    BEHAVIOUR.clear()
    monkeypatch.setattr(benchmark, "create_launchers", fakes)
    monkeypatch.setattr(
        benchmark, "prepare_subject", lambda wanted: ModelUnderTest(wanted.model, wanted.model)
    )


def bench(*arguments: str, modes: str = "vllm-warm,fresh", runs: int = 1) -> int:
    given = (f"--runs={runs}", "--warmup=0", "--no-steady", f"--modes={modes}")
    return main("bench", "tiny-llama", *given, *arguments)


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_bench_writes_reports_and_prints_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, saved = tmp_path / "r.html", tmp_path / "r.json"
    assert bench(f"--export=html={page}", f"--export=json={saved}", "--export=markdown") == 0
    assert capsys.readouterr().out.startswith("# Cold start of tiny-llama")
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(saved.read_text())["failures"] == []
    assert str(tmp_path) not in saved.read_text()


# tests/unit/bench/test_bench_runner.py shows each failure.
def test_bench_exits_1_when_a_mode_fails(capsys: pytest.CaptureFixture[str]) -> None:
    BEHAVIOUR["fresh"] = "dies"
    assert bench("--format", "json") == 1
    (failure,) = result(capsys)["failures"]
    assert failure.startswith("fresh: ")


@pytest.mark.slow
def test_bench_exits_1_when_slower_than_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "base.json"
    assert bench(f"--export=json={saved}", runs=3) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("mode") and "greedy tokens: identical in all modes" in shown.out
    assert "fresh round-2: first token after" in shown.err
    assert bench(f"--baseline={saved}", "--max-regress=5000", runs=3) == 0
    document = json.loads(saved.read_text())
    for found in document["modes"].values():
        for sample in found["samples"]:
            sample["first_token_s"] /= 1000
    saved.write_text(json.dumps(document))
    capsys.readouterr()
    assert bench(f"--baseline={saved}", "--format=json", runs=3) == 1
    found = result(capsys)
    assert found["baseline"]["modes"]["fresh"]["verdict"] == "regression"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--export=pdf"],
        ["--export=html", "--export=json"],
        ["--export=html=/no/such/x"],
        ["--export=csv=/"],
        ["--modes=x"],
    ],
)
def test_bench_exits_2_when_arguments_are_invalid(wrong: list[str]) -> None:
    assert bench(*wrong) == 2


ROWS = ({"name": "x | y", "size": 3}, {"name": "z", "size": None})
TABLES = [(("name", "size"), (("x | y", "3"), ("z", "-")))]
RESULT = Report("A <title>", {"a": 1}, ROWS, TABLES)


def test_exports_write_every_form_or_leave_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [f"{form}={tmp_path / form}" for form in FORMATS]
    assert ExportTargets.parse(wanted).write(RESULT) == list(FORMATS)
    assert json.loads((tmp_path / "json").read_text()) == {"a": 1}
    assert (tmp_path / "csv").read_text() == "name,size\nx | y,3\nz,\n"
    assert "| x \\| y | 3 |" in (tmp_path / "markdown").read_text()
    page = (tmp_path / "html").read_text()
    pages.check(page)
    assert "A &lt;title&gt;" in page and "<td>z</td><td>-</td>" in page
    monkeypatch.setattr(Report, "render", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ExportTargets.parse(wanted).write(RESULT)
    assert (tmp_path / "html").read_text() == page
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FORMATS)
