"""The examples run what there is: their host file is accepted, their options exist, systemd takes the unit."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from coldstart.commands.cli import load

from coldstart.contract import environment
from coldstart.host import configuration
from coldstart.host.configuration import Profile

EXAMPLES = Path(__file__).parents[2] / "examples"
UNIT = EXAMPLES / "systemd" / "coldstart-host.service"


def _options() -> set[str]:
    return {flag for parameter in load("host").commands["run"].params for flag in parameter.opts}


def test_the_host_file_is_a_host() -> None:
    table = configuration.read(EXAMPLES / "host.toml")
    file = configuration.parse(table, lambda launch: Profile(16 << 30, 1.0, "bundle"))
    assert [spec.name for spec in file.models] == ["llama2-7b", "qwen3-8b"] and file.models[0].pinned


def _command_lines() -> list[list[str]]:
    (start,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), flags=re.M)
    (container,) = re.findall(
        r"^CMD \[(.*)\]$", (EXAMPLES / "container/Containerfile").read_text(), flags=re.M
    )
    return [shlex.split(start)[1:], re.findall(r'"([^"]*)"', container)]


@pytest.mark.parametrize("words", _command_lines())
def test_the_command_lines_are_the_host_s(words: list[str]) -> None:
    assert words[:2] == ["host", "run"]
    assert {word for word in words if word.startswith("--")} <= _options()


def test_the_key_is_read_from_the_variable_that_the_examples_name() -> None:
    loaded = load("host")
    name = f"{loaded.context_settings['auto_envvar_prefix']}_RUN_API_KEY"
    texts = [path.read_text() for path in EXAMPLES.rglob("*") if path.is_file()]
    assert name == "COLDSTART_HOST_RUN_API_KEY" and sum(name in text for text in texts) == 3
    named = {word for text in texts for word in re.findall(r"COLDSTART_[A-Z_]+", text)} - {name}
    assert named == {environment.CACHE_DIR}


def test_compose_mounts_and_builds_what_there_is() -> None:
    (service,) = yaml.safe_load((EXAMPLES / "container/compose.yaml").read_text())["services"].values()
    mounted = [Path(one.partition(":")[0]) for one in service["volumes"] if one.startswith(".")]
    assert all((EXAMPLES / "container" / path).is_file() for path in mounted) and mounted
    root = EXAMPLES / "container" / service["build"]["context"]
    assert (root / service["build"]["dockerfile"]).is_file() and (root / "pyproject.toml").is_file()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here: the unit was not checked")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    # A program that is not installed is a fault to it: any that is there stands in.
    text = (
        UNIT.read_text()
        .replace("/opt/coldstart/bin/coldstart", "/bin/true")
        .replace("User=coldstart", "User=root")
    )
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert UNIT.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_demonstration_names_options_that_there_are() -> None:
    text = (EXAMPLES / "two_models.py").read_text()
    (command,) = re.findall(r"command = \[COLDSTART, (.*?)\]", text, flags=re.S)
    assert set(re.findall(r"--[a-z-]+\w", command)) <= _options()
    assert "examples/two_models.py" in (EXAMPLES.parent / "Makefile").read_text()
