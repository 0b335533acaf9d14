"""A Ray of the fleet's own: its first node, a child process of `fleet up` that lives as long as that."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.cluster import ray_node
from coldstart.contract import environment
from coldstart.errors import CommandFailed
from coldstart.fleet.specification import ServerSpec
from coldstart.machine.addresses import free_port
from coldstart.machine.paths import Cache

START_S, END_S = 120.0, 30.0


class RayHead:
    """The node that `process` is. `env` is what clients of this Ray need, `address` its HOST:PORT once it has started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int, env: dict[str, str]) -> None:
        self.process, self.log, self.port, self.env = process, log, port, env
        self.address = ""

    def ended(self) -> bool:
        """Ray ends the whole node with any of its processes."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        """What it said of its end: the last error in its log, else the last line."""
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if "Error: " in line]
        return (errors or said or ["it did not say why"])[-1]

    def wait(self, seconds: float = START_S) -> None:
        """Until it has started. Raises CommandFailed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.ended():
            text = self.log.read_text(errors="replace")
            if "Ray runtime started" in text:
                # Ray picks the address itself, whatever it is told of loopback.
                where = next(line for line in text.splitlines() if "Local node IP:" in line)
                self.address = f"{where.rpartition(':')[2].strip()}:{self.port}"
                return
            time.sleep(0.1)
        raise CommandFailed(f"Ray did not start on this machine: {self.last_words()}")

    def end(self) -> None:
        """End it, with all of its processes."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def begun(server: ServerSpec | None, cache: Cache) -> Iterator[RayHead]:
    """A started Ray with a token of its own; `server` is what this machine can serve. Raises CommandFailed."""
    env = {
        **ray_node.ENVIRONMENT,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        str(environment.CACHE_DIR): str(cache.root),
    }
    directory, port = ray_node.own_directory(), free_port()
    log = directory / "head.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ray_node.head(server, directory, port),
            env=os.environ | env | {str(environment.SUPERVISOR_PID): str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = RayHead(process, log, port, env)
    try:
        made.wait()
        yield made
    finally:
        made.end()
        shutil.rmtree(directory, ignore_errors=True)
