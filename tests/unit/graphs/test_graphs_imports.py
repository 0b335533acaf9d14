"""Modules that a machine without a GPU never imports."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import coldstart.vllm.graphs.entry as entry; entry.register()
import coldstart.launch.ladder, coldstart.materialize.materialize, coldstart.materialize.graphs
import coldstart.graphs.prove, coldstart.graphs.offline, coldstart.validate.start
import coldstart.vllm.graphs.plugin, coldstart.graphs.restore
print(sorted(n for n in sys.modules if n.split(".")[0] in ("cuda", "torch", "vllm") or ".graphs.cuda" in n))
"""


def test_no_driver_no_torch_no_engine() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
