"""Output of the tutorial's commands on this machine, for docs/tutorial/ and docs/reference/commands.md.

Needs an empty store: set COLDSTART_CACHE_DIR and XDG_STATE_HOME to new directories. A server runs until the next command
that is not a request.

Run: python -m benchmarks start/transcript
Time: about 5 minutes
Result: transcript.json
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS

RESULT = RESULTS / "transcript.json"
ARGS = "-- --max-model-len 1024 --kv-cache-memory-bytes 268435456"
COMMANDS = {
    "materialize": f"coldstart materialize tiny-llama {ARGS}",
    "list": "coldstart list",
    "miss": "coldstart inspect tiny-llama -- --max-model-len 512",
    "validate": "coldstart validate tiny-llama --level checksum",
    "serve": "coldstart serve tiny-llama --port 8557",
    "request": "curl -s http://127.0.0.1:8557/v1/completions -H 'Content-Type: application/json'"
    """ -d '{"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": 8}'""",
    "template": "coldstart template start tiny-llama",
    "serve-template": "coldstart serve tiny-llama --port 8557",
    "stop": "coldstart template stop",
}
# Lines of a server's own log, and those that say that a phase still runs, which a fast machine does not print.
OMITTED = re.compile(
    r"\(APIServer|\(EngineCore|INFO:|Loading safetensors|\[(?!\d+ of )|  \[\d+ of \d+\] .*: \d+ s"
)
Server = subprocess.Popen[str]


def run(command: str) -> tuple[str, Server | None]:
    """Run `command`. Return what it prints, stdout and then stderr, without a server's own log; and the server if it is one."""
    program, *arguments = shlex.split(command)
    if program == "coldstart":
        program = str(Path(sys.executable).with_name("coldstart"))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        server = process if arguments[0] == "serve" else None
        printed = process.stdout.readline() if server else process.communicate()[0]
        errors.seek(0)
        notes = [line for line in errors if not OMITTED.match(line)]
    kept = [line for line in notes if not server or line.startswith("Using ")]
    return printed + "".join(kept), server


def stop(server: Server) -> None:
    """Stop a server and wait for its end."""
    server.terminate()
    server.communicate()


def main() -> None:
    """Run every command in order and keep what it printed."""
    printed, server = {}, None
    for name, command in COMMANDS.items():
        if server and not command.startswith("curl"):
            stop(server)
            server = None
        text, started = run(command)
        printed[name] = {"command": command, "printed": text}
        server = started or server
    RESULT.write_text(json.dumps(printed, indent=2) + "\n")


if __name__ == "__main__":
    main()
