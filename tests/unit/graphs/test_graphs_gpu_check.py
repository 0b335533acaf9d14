"""Runs benchmarks/gpu/verify.py with fake phases; this does not test a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import answers, verify


def _check(tmp_path: Path, seconds: float = 60, **options: Any) -> verify.Check:
    return verify.Check(tmp_path, 1, time.monotonic() + seconds, **options)


def test_a_failed_phase_leaves_the_others_and_the_report_is_always_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, seen = tmp_path / "report.json", list[list[str]]()

    def step(step: Any, where: Path, layers: int, limit: float) -> dict[str, Any]:
        if out.exists():
            seen.append([s["label"] for s in json.loads(out.read_text())["steps"]])
        assert limit <= step[4]
        return {"label": step[0], "ok": step[0] == "P0", "result": {}, "error": "no device"}

    monkeypatch.setattr(verify, "run_step", step)
    report = _check(tmp_path, out=out).run()
    labels = [s["label"] for s in report["steps"]]
    assert (
        len(labels) == len(set(labels)) == 2 + len(verify.ONCE) + len(verify.AGAIN) + 20 and labels[0] == "P0"
    )
    assert report["conclusions"]["phases_failed"] == labels[1:] and seen[0] == ["P0"]
    assert json.loads(out.read_text())["steps"] == report["steps"]


def test_the_phases_that_decide_most_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify, "run_step", lambda step, *rest: {"label": step[0], "ok": True, "result": {}})
    labels = [step["label"] for step in _check(tmp_path).run()["steps"]]
    first = ["P0", "P0.map", "P1.1", "P2", "P2.more", "P3", "P4.1", "P4.gate"]
    assert labels[:8] == first and {label[:2] for label in labels[8:10]} == {"P5"}
    assert {label[:2] for label in labels[-20:]} == {"P6"}


def test_a_crash_leaves_the_earlier_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child gives an answer, prints noise, and dies like a driver that reads a misaligned address."""
    code = tmp_path / "crash.py"
    code.write_text(
        "import os, signal\nfrom benchmarks.gpu.answers import ask\n"
        "ask('division', lambda: 1 / 0)\nask('cupti', lambda: 'ok')\nprint('noise')\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    script = tmp_path / "python.sh"
    script.write_text(f"#!/bin/sh\necho reason >&2\nPYTHONPATH=. exec {sys.executable} {code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(verify.sys, "executable", str(script))
    found = verify.run_step(("P0", "probe", "streams", 1, 9), tmp_path, 1, 60.0)
    assert found["answers"] == {"division": "ZeroDivisionError: division by zero", "cupti": "ok"}
    assert not found["ok"] and found["error"] == "killed by SIGSEGV" and "reason" in found["stderr"]


def test_only_some_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify, "run_step", lambda step, *rest: {"label": step[0], "ok": True, "result": {}})
    assert [s["label"] for s in _check(tmp_path, only="P0").run()["steps"]] == ["P0", "P0.map"]
    assert [s["label"] for s in _check(tmp_path, only="P1").run()["steps"]] == ["P1.1", "P1.2", "P1.3"]
    late = _check(tmp_path, seconds=0, only="P2").run()
    assert [s["error"] for s in late["steps"]] == ["no time was left"] * 2


def test_the_budgets_fit_into_the_time() -> None:
    """The worst case of the required phases must fit; a normal run takes much less."""
    once = sum(step[4] for step in [*verify.PROBES, *verify.ONCE])
    features = max(sum(step[4] for step in steps) for steps in verify.FEATURES.values())
    assert once <= 900 and features <= 300
    assert all(step[4] <= 150 for step in [*verify.PROBES, *verify.ONCE, *verify.AGAIN])


def test_report_contains_the_reason_without_conclusions(tmp_path: Path) -> None:
    check = _check(tmp_path)
    check.steps = [
        {"label": "P1.1", "ok": True, "result": {"times": {}}}, {"label": "P4.1", "ok": True, "result": {"hashes": {}}}
    ]  # fmt: skip
    assert "KeyError" in check.report()["conclusions"]["not_concluded"]


@pytest.mark.parametrize(
    ("out", "code", "error"),
    [
        ("", 0, "no result"),
        ("warning", 0, "no result"),
        ("{}", 1, "exit code 1"),
        ("", None, "no answer"),
        ("", -11, "killed by SIGSEGV"),
    ],
)
def test_every_result_of_a_phase_is_reported(out: str, code: int | None, error: str) -> None:
    found = answers.summarize("P9", code, 3.0, out, "Traceback")
    assert not found["ok"] and error in found["error"]


def test_a_phase_that_hangs_ends_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "hang.sh"
    script.write_text("#!/bin/sh\nsleep 60 & echo $! > $(dirname $0)/pid; wait\n")
    script.chmod(0o755)
    monkeypatch.setattr(verify.sys, "executable", str(script))
    found = verify.run_step(("P9", "probe", "llama", 1, 9), tmp_path, 1, 2.0)
    assert "no answer" in found["error"]
    stat = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "it still runs"
        time.sleep(0.02)
