"""Output of the commands on this machine, for docs/commands.md.

Needs the bundle that `make demo` creates. A server is stopped as soon as it is ready.

Run: python -m benchmarks start/transcript
Time: about 3 minutes
Result: transcript.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common import RESULTS

RESULT = RESULTS / "transcript.json"
ARGS = "-- --max-model-len 1024 --kv-cache-memory-bytes 268435456"
COMMANDS = {
    "materialize": f"coldstart materialize tiny-llama --force {ARGS}",
    "inspect": "coldstart inspect tiny-llama -- --max-model-len 512",
    "validate": "coldstart validate tiny-llama --level checksum",
    "serve": "coldstart serve tiny-llama --port 8557",
    "template": f"coldstart template start tiny-llama --level engine {ARGS}",
    "stop": "coldstart template stop",
}
SERVER_LOG = ("(APIServer", "(EngineCore", "INFO:", "Loading safetensors", "[")


def run(command: str) -> str:
    """Return stdout and then stderr of `command`, without a server's log."""
    program = str(Path(sys.executable).with_name("coldstart"))
    process = subprocess.Popen(
        [program, *command.split()[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    if " serve " in command:
        first = process.stdout.readline()
        process.terminate()
        notes = process.communicate()[1].splitlines(True)
        return first + "".join(line for line in notes if line.startswith("Using "))
    out, err = process.communicate()
    return out + "".join(line for line in err.splitlines(True) if not line.startswith(SERVER_LOG))


def main() -> None:
    """Run every command in order and keep what it printed."""
    printed = {name: {"command": command, "printed": run(command)} for name, command in COMMANDS.items()}
    RESULT.write_text(json.dumps(printed, indent=2) + "\n")


if __name__ == "__main__":
    main()
