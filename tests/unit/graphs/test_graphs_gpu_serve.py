"""benchmarks/gpu/serve.py on a machine without a GPU: requirements, failed steps, and random models."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def serve() -> Any:
    from benchmarks.gpu import serve

    return serve


def test_failed_step_does_not_stop_the_others(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = tmp_path / "coldstart"
    console.write_text(
        '#!/bin/sh\n[ $1 = materialize ] && { echo "no device" >&2; exit 2; }\nprintf "{\\n  \\"%s\\": 1\\n}\\n" $1\n'
    )
    console.chmod(console.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(serve, "_console", lambda: str(console))
    run = serve.Run(tmp_path / "out.json", time.monotonic() + 60)
    for name in ("doctor", "materialize", "bench"):
        run.step(name, name)
    rows = {row["step"]: row for row in json.loads((tmp_path / "out.json").read_text())["steps"]}
    assert [rows[n]["ok"] for n in ("doctor", "materialize", "bench")] == [True, False, True]
    assert rows["bench"]["result"] == {"bench": 1} and "JSONDecodeError" in rows["materialize"]["error"]
    late = serve.Run(None, time.monotonic() + 1)
    assert late.step("doctor", "doctor") is None and "no time was left" in late.report["steps"][0]["error"]


def test_command_can_stop_its_processes_at_the_timeout(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console, ended = tmp_path / "coldstart", tmp_path / "ended"
    console.write_text(f"#!/bin/sh\ntrap 'touch {ended}; exit 143' TERM\nsleep 30 >/dev/null 2>&1 &\nwait\n")
    console.chmod(console.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(serve, "_console", lambda: str(console))
    monkeypatch.setattr(serve, "LEAST_S", 0.0)
    run = serve.Run(None, time.monotonic() + 2)
    run.step("bench", "bench")
    assert "TimeoutExpired" in run.report["steps"][0]["error"] and ended.exists()


def test_missing_requirements_are_reported_before_the_run(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_console", lambda: str(tmp_path / "absent"))
    missing = serve.needs(1 << 60, tmp_path)
    assert len(missing) == 2 and "pip install" in missing[0] and "--work" in missing[1]
    assert not any("GB" in said for said in serve.needs(0, tmp_path))


@pytest.mark.slow
def test_transformers_opens_a_random_model(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(serve.SHAPES, "tiny", (2, 64, 96, 4, 2))
    made = serve.random_model("tiny")
    model, found = transformers.AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_hidden_layers == 2 and serve.random_model("tiny") == made
