"""Run the command line in a child process with a separate home directory, or parse it only."""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from coldstart.commands import cli
from tools.forked import coldstart

Run = Callable[..., subprocess.CompletedProcess[str]]
"""run(*args, code=0, cwd=None): the finished process; fails unless it exits with ``code`` (None: any)."""


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


def main(*words: str) -> int:
    """Run `coldstart WORDS` in this process, and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def check_pod(pod: Mapping[str, Any]) -> None:
    """Fail unless the containers of a pod mount all its volumes and run commands that coldstart has, or Ray's."""
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    mounted = {mount["name"] for one in containers for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for container in containers:
        words = [*container["command"], *container.get("args", [])]
        if words[0] == "/bin/bash":
            words = re.findall(r"coldstart [^&]*", words[2])[0].split() if "coldstart" in words[2] else []
        if words:
            assert words[0] == "coldstart"
            parse(words[1:])


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
