"""Build the fake driver with the system's C compiler and run children over it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("fake_cuda.c")


def available() -> str | None:
    """Return the reason why the fake driver cannot be used here, or None."""
    if shutil.which("cc") is None:
        return "no C compiler"
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return "cuda-bindings is not installed"
    return None


def build(directory: Path) -> Path:
    """Compile libcuda.so.1 into `directory`."""
    out = directory / "libcuda.so.1"
    command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(out), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return directory


def run(library: Path, *arguments: object, module: str = "support.fake_cuda.child") -> dict[str, Any]:
    """Run one child process and return its last line, parsed."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"child ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result | {"stderr": done.stderr}
