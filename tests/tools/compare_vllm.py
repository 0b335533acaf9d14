"""Compare the table of vLLM's names with the sources of a vLLM that is not installed: compare_vllm.py DIRECTORY...

DIRECTORY contains `vllm/`, such as an unpacked source distribution; further directories contain packages that it needs. The
modules are imported from there and executed with the installed torch, without vLLM's compiled code. No engine runs, so this
shows that names and signatures fit, and not that anything works. The exit code is 1 if something does not fit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import sys
from coldstart.vllm.compat import report
from coldstart.vllm.compat.inspection import problems
import vllm

assert vllm.__file__.startswith(sys.argv[1]), f"{vllm.__file__} is another vLLM"
report._import_subclasses()
found = [f"{' '.join(point.features)}: {problem}" for point in report.TABLE for problem in problems(point)]
print(*found, f"vLLM {vllm.__version__}: {len(report.TABLE)} points, {len(found)} problems", sep="\\n")
sys.exit(bool(found))
"""


def main(*directories: str) -> int:
    """Compare in a child process that finds `vllm` in the first directory."""
    places = [str(Path(directory).resolve()) for directory in directories]
    begin = f"import sys; sys.path[:0] = {places}\n"
    return subprocess.run([sys.executable, "-c", begin + CHILD, places[0]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if sys.argv[1:] else __doc__)
