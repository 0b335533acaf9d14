"""The commands that start real servers, mode by mode; none is started here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.bench import run_order
from coldstart.errors import CommandFailedError, NoBundleError
from coldstart.validate import launchers
from coldstart.validate.launch import ModeUnavailableError, RunFiles
from coldstart.validate.launchers import ModelUnderTest

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")
SUBJECT = ModelUnderTest("tiny-llama", "/models/tiny", ("--max-model-len", "256"))


@pytest.mark.parametrize("mode", [mode for mode in run_order.MODES if mode not in run_order.BASELINES])
def test_every_mode_of_coldstart_serves_the_same_arguments(tmp_path: Path, mode: str) -> None:
    (launcher,) = launchers.create_launchers(SUBJECT, [mode], tmp_path)
    run = RunFiles.create(tmp_path / "run-files")
    command = launcher.command(run)
    argv = list(command.argv)
    assert launcher.mode == argv[argv.index("--mode") + 1] == mode
    assert argv[argv.index("--ready-file") + 1] == str(run.ready)
    assert argv[-3:] == ["--", "--max-model-len", "256"]
    assert command.environment["XDG_RUNTIME_DIR"] == str(tmp_path / "run")
    assert launcher.writes_ready_file


def test_warm_starts_and_the_first_cold_one_share_their_caches(tmp_path: Path) -> None:
    cold, warm = launchers.create_launchers(SUBJECT, [run_order.VLLM_COLD, run_order.VLLM_WARM], tmp_path)
    first, second, shared = (
        one.command(RunFiles.create(tmp_path / str(number))).environment
        for number, one in enumerate((cold, cold, warm))
    )
    for name in CACHES:
        assert shared[name] == first[name] != second[name]
        assert all(not list(Path(one[name]).iterdir()) for one in (first, second))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_plain_vllm_has_its_free_options_or_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """The options of a GPU's build are not given to the CPU's, and never replace the user's own."""
    monkeypatch.setattr(launchers.runtime, "targets_cpu", lambda: on_cpu)
    monkeypatch.setattr(launchers, "find_spec", lambda name: name)
    names = ["vllm-warm", "vllm-free", "vllm-eager"]
    warm, free, eager = (
        one.command(RunFiles.create(tmp_path / one.mode))
        for one in launchers.create_launchers(SUBJECT, names, tmp_path)
    )
    plain = [word for word in warm.argv[5:] if not word.isdigit()]
    assert [word for word in eager.argv[5:] if not word.isdigit()] == [*plain, "--enforce-eager"]
    more = [] if on_cpu else ["-cc", launchers.FULL_DECODE_ONLY, "--load-format", "instanttensor"]
    assert [word for word in free.argv[5:] if not word.isdigit()] == [*plain, *more]
    assert launchers.FREE_VARIABLES.items() <= free.environment.items()
    assert not launchers.FREE_VARIABLES.items() <= warm.environment.items()
    own = ModelUnderTest("m", "/m", ("--load-format", "auto", "-cc", "{}"))
    (free_,) = launchers.create_launchers(own, ["vllm-free"], tmp_path)
    assert list(free_.command(RunFiles.create(tmp_path / "own")).argv).count("-cc") == 1


def test_a_mode_that_this_machine_lacks_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Callable[[], list[list[str]]]
) -> None:
    """On a GPU `snapshot` is that of vLLM."""
    monkeypatch.setattr(launchers.runtime, "targets_cpu", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for mode, reason in (("snapshot", "vllm snapshot needs"), ("template-engine", "cannot be forked")):
        (launcher,) = launchers.create_launchers(SUBJECT, [mode], tmp_path)
        with pytest.raises(ModeUnavailableError, match=reason):
            launcher.prepare()
    assert calls() == []


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
    monkeypatch.setattr(launchers, "coldstart_command", lambda: [sys.executable, "-I", "-c", CONSOLE])
    path = tmp_path / "run" / "calls"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_template_is_started_and_stopped_once(tmp_path: Path, calls: Callable[[], list[list[str]]]) -> None:
    (template,) = launchers.create_launchers(SUBJECT, [run_order.TEMPLATE_RUNTIME], tmp_path)
    template.close()
    assert calls() == []
    template.prepare()
    template.close()
    template.close()
    assert calls() == [
        ["template", "start", "tiny-llama", "--level", "runtime", "--", "--max-model-len", "256"],
        ["template", "stop", "--level", "runtime"],
    ]


@pytest.mark.parametrize(("status", "error"), [("1", CommandFailedError), ("3", NoBundleError)])
def test_a_template_that_does_not_come_up(
    tmp_path: Path,
    calls: Callable[[], list[list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("FAKE_STATUS", status)
    (template,) = launchers.create_launchers(SUBJECT, [run_order.TEMPLATE_ENGINE], tmp_path)
    with pytest.raises(error, match=f"exited with status {status}"):
        template.prepare()
    template.close()
    assert len(calls()) == 1
