"""Each scheduler setting is declared once, and every reader of the declaration agrees."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from coldstart.commands import cli

from coldstart.scheduling.declaration import Setting
from coldstart.scheduling.settings import KEY, SchedulerSettings, list_declarations, options

COMMANDS = ("serve", "trace-replay")


def command_options(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(cli.app)
    found = group.get_command(typer.Context(group), command)
    return {flag: one for one in found.params for flag in one.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_an_option_for_each_declared_flag(command: str) -> None:
    shown = command_options(command)
    for name, setting in options():
        option = shown[setting.flag]
        assert (option.name, option.help) == (setting.option, setting.help)
        assert option.default == ("auto" if name == "policy" else getattr(SchedulerSettings(), name))


def test_every_default_is_within_its_declared_range() -> None:
    SchedulerSettings().check()
    assert [name for name, _ in list_declarations()] == list(SchedulerSettings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"batch": 0}, "--batch must be at least 1, got 0"),
        ({"first_quantum_s": 0.0}, "--quantum must be above 0, got 0.0"),
        ({"oldest_share": 1.5}, "--oldest-share must be at least 0, at most 1, got 1.5"),
        ({"strategy": "magic"}, "--kv-strategy must be one of proactive, reactive, recompute, got 'magic'"),
        ({"growth": 1.0}, "growth must be above 1, got 1.0"),
    ],
)
def test_check_names_the_option_and_the_range_when_a_value_is_outside(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        SchedulerSettings(**changed).check()


def test_help_states_the_range_when_there_is_one() -> None:
    assert Setting("Number of queues.", least=1).help == "Number of queues. Range: at least 1."
    assert Setting("Name.").help == "Name."


def test_settings_survive_the_servers_arguments_without_host_memory() -> None:
    settings = SchedulerSettings(alpha_s=2.0, host_bytes=1 << 20)
    sent = json.loads(json.dumps(settings.additional_config()))
    assert sent == {KEY: {"policy": "skip-join-mlfq", "alpha_s": 2.0}}
    assert SchedulerSettings.read(sent) == SchedulerSettings(alpha_s=2.0)
