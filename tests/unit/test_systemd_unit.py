"""The systemd unit: the command in its comment builds bundles in the directories that the service reads."""

from __future__ import annotations

import re
from pathlib import Path

UNIT = (Path(__file__).parents[2] / "examples" / "systemd" / "coldstart-host.service").read_text()


def test_the_command_for_bundles_sets_every_directory_of_the_service() -> None:
    own = {entry for line in re.findall(r"^Environment=(.+)", UNIT, re.MULTILINE) for entry in line.split()}
    command = next(line for line in UNIT.splitlines() if "systemd-run" in line)
    directories = {
        entry for entry in own if entry.partition("=")[0] in ("COLDSTART_CACHE_DIR", "XDG_STATE_HOME")
    }
    assert len(directories) == 2 and directories <= set(re.findall(r"--setenv=(\S+)", command))
