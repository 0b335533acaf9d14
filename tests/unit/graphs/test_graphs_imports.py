"""Modules that a machine without a GPU never imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, os
{work}
print(sorted(n for n in sys.modules if n.split(".")[0] in ("cuda", "torch", "vllm") or ".graphs.cuda" in n))
"""


@pytest.mark.parametrize(
    "work",
    [
        "import coldstart.vllm.graphs.entry as e; e.register()",
        "import coldstart.launch.ladder, coldstart.materialize.materialize, coldstart.materialize.graphs",
        "import coldstart.graphs.prove, coldstart.graphs.offline, coldstart.validate.start",
        "import coldstart.vllm.graphs.plugin, coldstart.graphs.restore, coldstart.graphs.prove",
    ],
)
def test_no_driver_no_torch_no_engine(work: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(work=work)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
