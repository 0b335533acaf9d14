"""Stand-ins for what only a machine with a GPU has, built by the tests from a page of C or C++ each.

Their behaviour is taken from the real thing's own sources or manual, named in each head, never from our code.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def missing(compiler: str = "g++") -> str | None:
    """Why none can be built here, or None."""
    if shutil.which(compiler) is None:
        return f"no {compiler}"
    return None if importlib.util.find_spec("torch") else "torch, whose pybind11 is used, is not installed"


def extension(name: str, directory: Path) -> Any:
    """The module of `name`.cpp, compiled with PyTorch's own pybind11."""
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
    """`name`.c as a shared library; once loaded, whoever asks the loader for `soname` gets it."""
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
