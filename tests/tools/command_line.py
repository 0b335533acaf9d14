"""Run the command line in a child process with a separate home directory, or parse it only."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from coldstart.commands import cli
from tools.forked import coldstart

Run = Callable[..., subprocess.CompletedProcess[str]]
"""run(*args, code=0, cwd=None): the finished process; fails unless it exits with ``code`` (None: any)."""


@pytest.fixture
def home(tmp_path: Path, runtime_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set HOME to an empty directory and remove the user's variables."""
    for name in list(os.environ):
        if name.startswith(("COLDSTART_", "HF_", "XDG_")) and name != "XDG_RUNTIME_DIR":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def run(home: Path) -> Run:
    """Run ``coldstart ARGS`` and return its exit code, stdout and stderr."""

    def command(
        *args: str, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = coldstart(args, cwd or home)
        assert code is None or done.returncode == code, done.stderr
        return done

    return command


def parse(words: list[str]) -> None:
    """Parse the arguments without running the command.

    Raises:
        click.UsageError: The arguments are invalid.
    """
    own, _ = cli._split_vllm_args(words)
    command, context = typer.main.get_command(cli.app), None
    own = [word for word in own if word != "..."]
    while True:
        context = command.make_context(command.name or "coldstart", own, parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        _, command, own = command.resolve_command(context, rest)
