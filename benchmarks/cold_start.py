"""Cold start on this machine, from process launch to the first token over HTTP: plain vLLM against every start mode.

The physics: a start imports torch and vllm once (seconds of one core), brings the weights in (bytes over
bandwidth) and computes one token. Everything else that vLLM does at a start (compiling, importing again in two
more processes, asking a subprocess about the model class, filling the KV cache with zeros) was done before for
the same key. The floor of a mode is measured in the same run: for `fresh` a bare process that imports the same
modules, for the others a fork, plus in both cases one first token of a warm server; `% of floor` says how much
of the measured time is floor.

Runs are interleaved, order rotated by round; the figures are medians with their range. Simulated: nothing. CPU only.

    python benchmarks/cold_start.py [--runs N] [--export FORM=FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "cold-start-cpu.json"
MODEL = "tiny-llama"
VLLM_ARGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456"]


def main(arguments: list[str]) -> int:
    """Run the bench, keep its JSON, print the table for people and the JSON in one last line."""
    command = [
        str(Path(sys.executable).with_name("coldstart")),
        "bench",
        MODEL,
        f"--export=json={RESULT}",
        *arguments,
    ]
    code = subprocess.run([*command, "--", *VLLM_ARGS], check=False).returncode
    if RESULT.exists():
        print(json.dumps(json.loads(RESULT.read_text()), separators=(",", ":")))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
