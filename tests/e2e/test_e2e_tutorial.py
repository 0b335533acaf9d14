"""The tutorial: its commands run in order on a new machine and print what the pages show, but for numbers and digests."""

import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tools.machine import READY_S, Machine

from coldstart.system.ipc.addresses import find_free_port

pytestmark = pytest.mark.vllm
TUTORIAL = Path(__file__).parents[2] / "docs/tutorial"
PORT = "8557"


def blocks(*pages: str) -> list[tuple[str, list[str]]]:
    """Return command and expected lines of each console block."""
    text = "".join((TUTORIAL / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    found = [block.splitlines() for block in re.findall(r"^```console\n\$ (.*?)^```", text, re.M | re.S)]
    return [(command, expected) for command, *expected in found]


def shape(line: str) -> str:
    """Return a line without what differs between two runs: digests, numbers, widths of columns."""
    line = re.sub(r"\b[0-9a-f]{12}(?:[0-9a-f]{52})?\b", "DIGEST", line)
    line = re.sub(r"\d[\d.:TZ-]*", "N", line)
    return re.sub(r" {2,}", " ", line).strip()


@pytest.fixture
def fresh_machine() -> Iterator[Machine]:
    """A machine without bundles. Its path is short: unix sockets lie below it."""
    root = Path(tempfile.mkdtemp(prefix="cs-"))
    yield Machine(root)
    shutil.rmtree(root, ignore_errors=True)


class Terminal:
    """The reader's two terminals: a server runs until the next command that is not a request."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit code (0 for a server that is ready) and what it printed."""
        program, *arguments = shlex.split(command)
        if program == "curl":
            done = subprocess.run(
                [program, *arguments], capture_output=True, text=True, timeout=READY_S, check=True
            )
            return done.returncode, done.stdout
        self.stop_server()
        with tempfile.TemporaryFile("w+b") as errors:
            process = self.machine.start(*arguments, stdout=subprocess.PIPE, stderr=errors)
            assert program == "coldstart" and process.stdout is not None
            if arguments[0] == "serve":
                self.server = process
                printed, code = process.stdout.readline(), 0
            else:
                printed, code = self.wait(process)
            errors.seek(0)
            return code, (printed + errors.read()).decode(errors="replace")

    def wait(self, process: subprocess.Popen[bytes]) -> tuple[bytes, int]:
        """Wait for the end of a command; return its standard output and exit code. It does not outlive an error."""
        try:
            printed, _ = process.communicate(timeout=2 * READY_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)
        return printed, process.returncode

    def stop_server(self) -> None:
        """Stop the server as Ctrl-C does."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(timeout=60) == 130
            self.server = None


@pytest.mark.nightly
def test_tutorial_prints_what_its_pages_show(fresh_machine: Machine) -> None:
    port = str(find_free_port())
    with ExitStack() as cleanup:
        terminal = Terminal(fresh_machine)
        cleanup.callback(lambda: fresh_machine.start("template", "stop").wait(timeout=60))
        cleanup.callback(terminal.stop_server)
        for command, expected in blocks("first-bundle", "first-fast-start"):
            code, printed = terminal.run(command.replace(PORT, port))
            assert code == (3 if expected[0].startswith("error:") else 0), printed[-6000:]
            if command.startswith("curl"):
                keys = re.findall(r'"\w+":', expected[0])  # the page has the beginning of the answer
                assert keys and keys == re.findall(r'"\w+":', printed)[: len(keys)]
                continue
            shapes = {shape(line) for line in printed.splitlines()}
            lasting = [line for line in expected if "; now: " not in line]  # the others come each minute
            assert [line for line in lasting if shape(line) not in shapes] == [], printed[-6000:]


def test_doctor_prints_the_start_modes_that_the_first_page_explains(fresh_machine: Machine) -> None:
    printed = fresh_machine.run("doctor")
    (shown,) = re.findall(r"^start modes: .*$", (TUTORIAL / "install.md").read_text(encoding="utf-8"), re.M)
    modes = re.findall(r"[\w-]+(?= (?:yes|no))", shown)
    (line,) = re.findall(r"^start modes: .*$", printed, re.M)
    assert re.findall(r"[\w-]+(?= (?:yes|no))", line) == modes
