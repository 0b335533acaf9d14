"""Output of the tutorial's commands on this machine, for docs/tutorial/ and docs/reference/commands.md.

Needs an empty store: set COLDSTART_CACHE_DIR and XDG_STATE_HOME to new directories. A server runs until the next command
that is not a request.

Run: python -m benchmarks start/transcript
Time: about 5 minutes
Result: transcript.json
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish

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
    "up": f"coldstart up tiny-llama --detach {ARGS}",
    "up-request": "curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'"
    """ -d '{"model": "tiny-llama", "prompt": "Once upon a time", "max_tokens": 8}'""",
    "down": "coldstart down",
}
# Lines of a server's own log, its path on this machine, and those that report that a phase still runs.
OMITTED = re.compile(
    r"\(APIServer|\(EngineCore|INFO:|Loading safetensors|\[(?!\d+ of )|  .*: \d+ s$|The log of the server"
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


def run_all(commands: Mapping[str, str], measure: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run every command in order and return what it printed; `measure` gets the first line of each server."""
    printed: dict[str, Any] = {}
    server = None
    for name, command in commands.items():
        if server and not command.startswith("curl"):
            server.terminate()
            server.communicate()
            server = None
        text, started = run(command.replace("python examples", f"{sys.executable} {ROOT}/examples", 1))
        printed[name] = {"command": command, "printed": text}
        if started:
            server = started
            measure(text)
    return printed


def main() -> None:
    """Run the commands and store what they printed."""
    finish("transcript", run_all(COMMANDS))


if __name__ == "__main__":
    main()
