"""coldstart bench over fake servers: results on stdout, reports in files, exit codes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands import cli
from support.fake_launcher import FakeLauncher

from coldstart.bench import benchmark, measure
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
    monkeypatch.setattr(measure, "measure_import_seconds", lambda: 0.01)


def bench(*arguments: str, modes: str = "vllm-warm,fresh", runs: int = 1) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(
            [
                "bench",
                "tiny-llama",
                f"--runs={runs}",
                "--warmup=0",
                "--no-steady",
                f"--modes={modes}",
                *arguments,
            ]
        )
    assert isinstance(ended.value.code, int)
    return ended.value.code


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(runs=3) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].startswith("mode")
    assert "greedy tokens: identical in all modes" in shown.out
    assert "fresh round-2: first token after" in shown.err


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
    assert result(capsys)["failures"]


@pytest.mark.slow
def test_bench_exits_1_when_slower_than_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "base.json"
    assert bench(f"--export=json={saved}", runs=3) == 0
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
    [["--export=pdf"], ["--export=html", "--export=json"], ["--export=html=/no/such/x"], ["--modes=x"]],
)
def test_bench_exits_2_when_arguments_are_invalid(wrong: list[str]) -> None:
    assert bench(*wrong) == 2
