"""Cubins made by NVIDIA's own assembler out of sources of ours: the .cu files say what is to be found in them.

The .ptx beside each is nvcc 13.0.88's, by the command in the source's head. Triton's wheel, which the lock pins,
brings ptxas, so that nothing is installed for this and no GPU is needed.
"""

import importlib.util
import subprocess
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


def assembler() -> Path | None:
    """ptxas of PTX 9.0 or newer, or None where this platform has no Triton."""
    found = importlib.util.find_spec("triton")
    places = (found.submodule_search_locations or []) if found else []
    paths = [Path(place) / "backends/nvidia/bin/ptxas-blackwell" for place in places]
    return next((path for path in paths if path.is_file()), None)


@cache
def cubin(name: str, architecture: str) -> bytes:
    """`name`.ptx assembled for `architecture` (sm_80, sm_90, sm_90a)."""
    command = [str(assembler()), f"-arch={architecture}", "-o", "/dev/stdout", str(HERE / f"{name}.ptx")]
    return subprocess.run(command, check=True, capture_output=True).stdout
