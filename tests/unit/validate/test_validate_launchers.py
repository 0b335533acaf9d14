"""Commands that start a stock vLLM server and `coldstart serve`; no server is started."""

from pathlib import Path

from coldstart.validate import launchers
from coldstart.validate.launch import RunFiles

SUBJECT = launchers.Subject("tiny-llama", "/models/tiny", ("--max-model-len", "256"))


def _baselines(tmp_path: Path) -> list[launchers.VllmLauncher]:
    return [launchers.VllmLauncher(SUBJECT, tmp_path / "caches", mode) for mode in ("vllm-cold", "vllm-warm")]


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
