"""Replicas of libraries that exist only on a machine with a GPU, compiled by the tests from C or C++.

Their behaviour follows the sources or the manual of the original, which the head of each file names, never our code.
"""

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def missing(compiler: str = "g++") -> str | None:
    """Return the reason why no replica can be built here, or None."""
    if shutil.which(compiler) is None:
        return f"no {compiler}"
    return None if importlib.util.find_spec("torch") else "torch, whose pybind11 is used, is not installed"


def extension(name: str, directory: Path) -> Any:
    """Compile `name`.cpp with PyTorch's pybind11 and return its module."""
    import torch

    out = directory / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"]]
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++17", *(f"-I{i}" for i in includes)]
    subprocess.run([*command, "-o", str(out), str(HERE / f"{name}.cpp")], check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location(name, out)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(name: str, soname: str, directory: Path) -> Path:
    """Compile `name`.c to a shared library that the loader returns for `soname` once it is loaded."""
    out = directory / soname
    command = [
        "cc",
        "-O1",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{soname}",
        "-o",
        str(out),
        str(HERE / f"{name}.c"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return out
