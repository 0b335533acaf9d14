"""Time from process launch to the first token over HTTP, for plain vLLM and every start mode.

Measured on the CPU; benchmarks/RESULTS.md describes the columns.

Run: python -m benchmarks start/cold_start [--runs N] [--export FORMAT=FILE]
Time: about 40 minutes for 5 runs
Result: cold-start-cpu.json
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.common import RESULTS, finish
from coldstart.validate.launchers import find_coldstart_command

RESULT = RESULTS / "cold-start-cpu.json"
VLLM_ARGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456"]


def main(arguments: list[str]) -> int:
    """Run the bench, keep its JSON, print the table for people and the JSON without its lists."""
    words = ["tiny-llama", f"--export=json={RESULT}", *arguments, "--", *VLLM_ARGS]
    command = [*find_coldstart_command(), "bench", *words]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        finish(RESULT.stem, json.loads(RESULT.read_text()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
