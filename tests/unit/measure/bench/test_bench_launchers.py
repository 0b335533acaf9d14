"""The commands that start real servers; none is started here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.errors import CommandFailed, NoBundle
from coldstart.measure.bench import floor, launchers, run_order
from coldstart.measure.bench.launch import RunFiles

SUBJECT = launchers.Subject("tiny-llama", "/models/tiny", ("--max-model-len", "256"))


def files(tmp_path: Path, name: str) -> RunFiles:
    return RunFiles.make(tmp_path / name)


def test_cold_caches_are_new_for_every_run_and_warm_ones_are_kept(tmp_path: Path) -> None:
    cold, warm = launchers.launchers(SUBJECT, run_order.BASELINES, tmp_path)
    for name in (
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "XDG_CACHE_HOME",
        "TMPDIR",
    ):
        roots = [cold.command(files(tmp_path, f"c{i}{name}")).environment[name] for i in range(2)]
        assert roots[0] != roots[1]
        assert all(Path(root).is_dir() and not list(Path(root).iterdir()) for root in roots)
        kept = {warm.command(files(tmp_path, f"w{i}{name}")).environment[name] for i in range(2)}
        assert len(kept) == 1


def test_the_first_cold_start_fills_what_the_warm_ones_have(tmp_path: Path) -> None:
    cold, warm = launchers.launchers(SUBJECT, run_order.BASELINES, tmp_path)
    first, second = (cold.command(files(tmp_path, f"c{i}")).environment["VLLM_CACHE_ROOT"] for i in range(2))
    assert warm.command(files(tmp_path, "w")).environment["VLLM_CACHE_ROOT"] == first != second


def test_moving_the_caches_does_not_move_the_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert launchers.cache_variables(tmp_path)["HF_HOME"] == "/elsewhere/huggingface"


def test_the_baseline_is_vllms_own_server(tmp_path: Path) -> None:
    (warm,) = launchers.launchers(SUBJECT, [run_order.VLLM_WARM], tmp_path)
    run = files(tmp_path, "r")
    argv = list(warm.command(run).argv)
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert argv[argv.index("--model") + 1] == "/models/tiny"
    assert argv[argv.index("--port") + 1] == str(run.port)
    assert argv[-2:] == ["--max-model-len", "256"]
    assert not warm.tells_readiness


def test_a_careful_user_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert launchers.careful(SUBJECT)["VLLM_CPU_KVCACHE_SPACE"] == launchers.CPU_KV_GIB
    sized = launchers.Subject("m", "m", ("--kv-cache-memory-bytes=1G",))
    assert "VLLM_CPU_KVCACHE_SPACE" not in launchers.careful(sized)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert "VLLM_CPU_KVCACHE_SPACE" not in launchers.careful(SUBJECT)


def test_coldstart_modes_serve_the_same_arguments(tmp_path: Path) -> None:
    for launcher in launchers.launchers(SUBJECT, [run_order.FRESH, run_order.SNAPSHOT], tmp_path):
        run = files(tmp_path, launcher.mode)
        command = launcher.command(run)
        argv = list(command.argv)
        assert argv[argv.index("serve") + 1] == "tiny-llama"
        assert argv[argv.index("--mode") + 1] == launcher.mode
        assert argv[argv.index("--ready-file") + 1] == str(run.ready)
        assert argv[-3:] == ["--", "--max-model-len", "256"]
        assert command.environment["COLDSTART_TIMELINE_EVENTS"] == str(run.events)
        assert launcher.tells_readiness


def test_the_fork_floor_grows_with_memory() -> None:
    summary = floor.fork_s(4 << 20)
    assert summary["n"] == floor.FORKS
    assert 0 < summary["min"] <= summary["median"]


CONSOLE = """
import json, os, sys
from pathlib import Path
log = Path(os.environ["XDG_RUNTIME_DIR"]) / "calls"
with log.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Replaces the console script by one that notes its arguments."""
    monkeypatch.setattr(launchers, "console", lambda: [sys.executable, "-I", "-c", CONSOLE])
    path = tmp_path / "run" / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_template_is_started_and_stopped_once(tmp_path: Path, calls: Callable[[], list[list[str]]]) -> None:
    (template,) = launchers.launchers(SUBJECT, [run_order.TEMPLATE_RUNTIME], tmp_path)
    template.close()
    assert calls() == []
    template.prepare()
    template.close()
    template.close()
    assert calls() == [
        ["template", "start", "tiny-llama", "--level", "runtime", "--", "--max-model-len", "256"],
        ["template", "stop", "--level", "runtime"],
    ]


@pytest.mark.parametrize(("status", "error"), [("1", CommandFailed), ("3", NoBundle)])
def test_a_template_that_does_not_come_up(
    tmp_path: Path,
    calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("FAKE_STATUS", status)
    (template,) = launchers.launchers(SUBJECT, [run_order.TEMPLATE_ENGINE], tmp_path)
    with pytest.raises(error, match=f"ended with status {status}"):
        template.prepare()
    template.close()
    assert len(calls()) == 1
