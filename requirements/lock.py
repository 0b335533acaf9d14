"""Resolve the lock files of this directory with uv. Run it by `make lock`; pins that still fit are retained.

cpu.lock holds everything that the tests and the demo need without a GPU, but for torch, whose build `coldstart install cpu`
chooses. Each pin has the digests of its files, which pip compares. torch-cuda.lock holds torch's CUDA build with its libraries,
for machines that cannot reach a CPU build. It has no digests: `coldstart install cpu` passes it as a constraint on all builds.
browser.lock holds the Chromium of the tests of pages, for an environment of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
EXTRAS = ("cpu", "all", "peers", "docs", "dev")
TORCH = "torch==2.13.0"
# Of axe-playwright-python only axe-core's script is used, so Playwright stays out.
BROWSER, UNUSED = "PyQt6-WebEngine\naxe-playwright-python\n", "playwright\n"
# pyproject.toml resolves for Linux and vLLM's Pythons only, so this condition is on every line and says nothing.
EVERYWHERE = re.compile(r"python_full_version < '3\.15' and | and sys_platform == 'linux'")
ONLY = re.compile(r" ; (python_full_version < '3\.15'|sys_platform == 'linux')(?=$| \\$)", re.MULTILINE)


def main() -> None:
    """Write both lock files."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    sources = ("pyproject.toml", str(HERE / "cpu.in"))
    with listed("torch\n") as excluded:
        compile_lock("cpu.lock", *extras, "--generate-hashes", "--excludes", excluded, *sources)
    with listed(UNUSED) as excluded:
        compile_lock("browser.lock", "--generate-hashes", "--excludes", excluded, "-", given=BROWSER)
    compile_lock("torch-cuda.lock", "--constraints", str(HERE / "cpu.lock"), "-", given=TORCH)


@contextmanager
def listed(names: str) -> Iterator[str]:
    """Write names of packages to a file for the time of the block, and return its path."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(names)
        file.flush()
        yield file.name


def compile_lock(name: str, *arguments: str, given: str | None = None) -> None:
    """Resolve one lock file for all supported Pythons and drop the conditions that hold everywhere."""
    target = HERE / name
    options = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet")
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        *options,
        *arguments,
        "--output-file",
        str(target),
    ]
    subprocess.run(command, cwd=HERE.parent, input=given, text=True, check=True)
    pins = ONLY.sub("", EVERYWHERE.sub("", target.read_text(encoding="utf-8")))
    target.write_text(f"# Resolved by `make lock`; install it with --no-deps.\n{pins}", encoding="utf-8")


if __name__ == "__main__":
    main()
