"""Options of every command: examples parse, and help states defaults."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from coldstart.commands import cli
from coldstart.commands._examples import EXAMPLES
from tools.command_line import parse

# Help texts that state what happens without the option.
STATED = re.compile(r"[Dd]efault|[Oo]nly |else |instead of |repeatable|Repeatable|several times")
# Options without a default and without an effect when they are not given.
ABSENT = {
    "--address", "--admin-key", "--api-key", "--baseline", "--columns", "--diff",
    "--fleet", "--host", "--host-file", "--kv-blocks", "--kv-host-memory", "--max",
    "--memory", "--min", "--model", "--models", "--name", "--profile", "--ready-file", "--slo",
    "--state", "--sweep", "--timeline", "--weights-from",
}  # fmt: skip


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or typer.main.get_command(cli.app)
    if not hasattr(group, "list_commands"):
        yield words, group
        return
    context = typer.Context(group)
    for name in group.list_commands(context):
        yield from commands(group.get_command(context, name), (*words, name))


EVERY = dict(commands())


def options(command: Any) -> Iterator[Any]:
    return (
        one for one in command.params if one.opts[0].startswith("-") and not getattr(one, "hidden", False)
    )


def help_text(words: tuple[str, ...]) -> str:
    command = EVERY[words]
    return str(command.get_help(typer.Context(command, info_name=words[-1], terminal_width=200)))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_has_two_examples_that_parse(words: tuple[str, ...]) -> None:
    shown = help_text(words)
    examples = EXAMPLES[" ".join(words)]
    assert len(set(examples)) >= 2
    for example in examples:
        assert f"\n    {example}\n" in f"{shown}\n"
        program, *typed = shlex.split(example)
        assert program == "coldstart"
        # `host MODEL` is `host run MODEL`.
        assert typed[: len(words)] == list(words) or (words == ("host", "run") and typed[0] == "host")
        parse(typed)


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_states_defaults(words: tuple[str, ...]) -> None:
    shown = " ".join(help_text(words).split())
    for option in options(EVERY[words]):
        if option.default not in (None, False, "", (), []) and not option.multiple:
            assert f"default: {_written(option)}" in shown, option.opts
        elif option.default is None and not option.multiple and option.opts[0] not in ABSENT:
            assert STATED.search(option.help), (option.opts, option.help)


def _written(option: Any) -> str:
    if option.is_flag:
        return str((option.opts if option.default else option.secondary_opts)[0].removeprefix("--"))
    return str(getattr(option.default, "value", option.default))


def test_every_command_has_json_output() -> None:
    for command in EVERY.values():
        (form,) = [option for option in options(command) if option.opts[0] == "--format"]
        assert "json" in form.type.choices


def contexts() -> Iterator[tuple[tuple[str, ...], typer.Context]]:
    """Yield each command with the context in which the command line parses it."""
    for name in cli.COMMANDS:
        loaded = cli.load(name)
        context = typer.Context(loaded, info_name=name, **loaded.context_settings)
        yield (name,), context
        for word, below in getattr(loaded, "commands", {}).items():
            yield (name, word), typer.Context(below, info_name=word, parent=context)


@pytest.mark.parametrize(
    ("words", "context"), [pytest.param(*one, id=" ".join(one[0])) for one in contexts()]
)
def test_each_option_has_the_variable_of_its_name(
    words: tuple[str, ...], context: typer.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in (one for one in context.command.params if one.opts[0].startswith("-")):
        key = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        variable = "_".join(["coldstart", *words, key]).replace("-", "_").upper()
        with monkeypatch.context() as environment:
            environment.setenv(variable, "typed")
            assert option.resolve_envvar_value(context) == "typed", variable
