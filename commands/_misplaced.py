"""Explain an option of vLLM that stands before `--`, in a command that passes arguments on to vLLM."""

import difflib
import shlex
from collections.abc import Mapping, Sequence

import typer
from typer.core import TyperCommand

from coldstart.errors import UsageError

PASSED = "[-- VLLM_ARGUMENTS]"


class PassingCommand(TyperCommand):
    """Command that passes the arguments after `--` to vLLM; the parser does not read them."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the words of the usage line after the command's name."""
        return [*super().collect_usage_pieces(ctx), PASSED]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments. Raises UsageError for an option that is vLLM's and resembles none of this command."""
        takes_value = {
            name: not getattr(one, "is_flag", False)
            for one in self.get_params(ctx)
            for name in (*one.opts, *one.secondary_opts)
            if name.startswith("-")
        }
        own, moved = separate(args, takes_value)
        unknown = [word.partition("=")[0] for word in moved if _is_option(word)]
        resembles = any(difflib.get_close_matches(word, takes_value, cutoff=0.8) for word in unknown)
        if unknown and not resembles and _correct(unknown[0]):
            correct = [_correct(word) or word if _is_option(word) else word for word in moved]
            typed = [*ctx.command_path.split(), *own, "--", *correct, *(ctx.obj or ())]
            raise UsageError(
                f"No such option of {ctx.info_name}: {unknown[0]}",
                hint=f"put options of vLLM after --: {shlex.join(typed)}",
            )
        return super().parse_args(ctx, args)


def _correct(word: str) -> str | None:
    """Return the option of vLLM as it is spelt correctly, with a value after "="; None if vLLM has none like it."""
    from coldstart.models import options

    name, equals, value = word.partition("=")
    if not options.list_options() or options.is_listed(name):
        return word
    near = options.find_similar(name.removeprefix("--"))
    return f"--{near[0]}{equals}{value}" if near else None


def separate(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the known arguments, and the options that are not in `takes_value` with the arguments of each.

    A command needs its model: without another argument, the last one after an unknown option is the model.
    """
    own: list[str] = []
    moved: list[str] = []
    target, models, value_follows = own, 0, False
    for word in args:
        name, equals, _ = word.partition("=")
        is_option = _is_option(word) and not value_follows
        if is_option:
            target = own if name in takes_value else moved
        models += not is_option and not value_follows and target is own
        target.append(word)
        value_follows = takes_value.get(name, False) and not equals and not value_follows
    if not models and moved and not _is_option(moved[-1]):
        own.append(moved.pop())
    return own, moved


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()
