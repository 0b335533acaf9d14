"""Run ``coldstart`` in a process forked from one that has imported the modules of its commands.

Environment, working directory and output are separate, as for any other process. Only the start of the interpreter, which
takes longer than most commands, is shared.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
# Of coldstart only what most commands import is preloaded: a forgotten import in a command must fail.
_PROCESSES.set_forkserver_preload(
    [
        __name__,
        "coldstart.commands.cli",
        "coldstart.commands._options",
        "coldstart.models.inspection",
        "urllib3",
        "rich.console",
        "rich.table",
        "cryptography.x509",
        "pandas",
    ]
)


def coldstart(
    arguments: Sequence[str], cwd: Path, timeout_s: float = 540.0
) -> subprocess.CompletedProcess[str]:
    """Run ``coldstart ARGUMENTS`` with this process's environment. Raises TimeoutExpired."""
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        given = (list(arguments), dict(os.environ), cwd, out.name, err.name)
        process = _PROCESSES.Process(target=_run, args=given)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(given[0], timeout_s)
        said = [Path(file.name).read_text() for file in (out, err)]
        return subprocess.CompletedProcess(given[0], process.exitcode, *said)


def _run(arguments: list[str], environment: dict[str, str], cwd: Path, out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["coldstart", *arguments]
    for descriptor, path in ((1, out), (2, err)):
        with Path(path).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.fsync = lambda descriptor: None  # as in the tests' own process
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from coldstart.commands import cli

    cli.main()
