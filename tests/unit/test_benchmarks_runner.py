"""`python -m benchmarks` lists the benchmarks and finds each by its name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import tables
from benchmarks.common import RESULTS, ROOT

BENCHMARKS = runner.find_benchmarks()


def test_list_shows_one_line_for_each_benchmark_without_heavy_imports() -> None:
    code = (
        "import sys, runpy; sys.argv = ['benchmarks']; runpy.run_module('benchmarks', run_name='__main__');"
    )
    code += "assert not {'torch', 'vllm', 'numpy', 'coldstart'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_docstring_states_the_command_the_time_and_the_result(name: str) -> None:
    fields = dict(line.split(": ", 1) for line in BENCHMARKS[name].splitlines() if ": " in line)
    assert fields["Run"].startswith(f"python -m benchmarks {name}")
    assert fields["Time"]
    assert fields["Result"].startswith("none") or (RESULTS / fields["Result"].split()[0]).is_file()


@pytest.mark.parametrize("name", ["start/cold_start", "cold_start", "cold-start"])
def test_resolve_finds_a_benchmark_by_its_full_or_short_name(name: str) -> None:
    assert runner.resolve(name) == "start/cold_start"


def test_resolve_names_the_list_when_there_is_no_such_benchmark() -> None:
    with pytest.raises(SystemExit, match="hint: python -m benchmarks"):
        runner.resolve("nothing")


def test_help_runs_no_benchmark_when_it_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    runner.main(["start/real_model", "--help"])
    assert capsys.readouterr().out.strip() == BENCHMARKS["start/real_model"]


def test_every_part_of_a_page_names_an_existing_benchmark() -> None:
    named = {part.benchmark.partition(" ")[0] for part in tables.parts() if part.benchmark}
    assert named <= set(BENCHMARKS)


def test_benchmarks_import_no_test_code() -> None:
    imported = {
        module.partition(".")[0] for path in (ROOT / "benchmarks").rglob("*.py") for module in _imports(path)
    }
    assert not imported & {"tests", "support", "tools"}


def _imports(path: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return named + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
