"""Commands that start a stock vLLM server and `coldstart serve`; no server is started."""

import socket
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from coldstart.system.proc import scratch
from coldstart.validate import launchers
from coldstart.validate.launch import Command, RunFiles, serving

SUBJECT = launchers.Subject("tiny-llama", "/models/tiny", ("--max-model-len", "256"))


def _baselines(tmp_path: Path) -> list[launchers.VllmLauncher]:
    return [launchers.VllmLauncher(SUBJECT, tmp_path / "caches", warm) for warm in (False, True)]


def files(tmp_path: Path, name: str) -> RunFiles:
    return RunFiles.make(tmp_path / name)


def test_cold_caches_are_new_for_every_run_and_warm_ones_are_kept(tmp_path: Path) -> None:
    cold, warm = _baselines(tmp_path)
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


def test_a_baseline_deep_below_has_room_for_vllms_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory of a baseline is below those of the run; vLLM binds sockets with the name of a UUID."""
    monkeypatch.delenv(scratch.SOCKETS_VARIABLE, raising=False)
    deep = tmp_path / ("x" * 100)
    _, warm = _baselines(deep)
    program = f"import os, sys; print(os.environ[{scratch.SOCKETS_VARIABLE!r}])"

    class Printing:
        mode, tells_readiness = "vllm-warm", False

        def prepare(self) -> None: ...

        def command(self, files: RunFiles) -> Command:
            return Command([sys.executable, "-c", program], warm.command(files).environment)

        def close(self) -> None: ...

    with serving(Printing(), deep / "run") as server:
        server.process.wait()
        sockets = Path(server.files.log.read_text().strip())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(sockets / str(uuid4())))
    assert not sockets.exists()
