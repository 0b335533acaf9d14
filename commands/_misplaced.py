"""Command that passes the arguments after `--` on to vLLM, and explains an option of vLLM that stands before `--`."""

import difflib

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
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The class is private to typer.
            if type(error).__name__ != "NoSuchOption":
                raise
            name: str = error.option_name  # type: ignore[attr-defined]
            own = [flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)]
            if difflib.get_close_matches(name, own, cutoff=0.8) or not (correct := _correct(name)):
                raise
            raise UsageError(
                f"No such option of {ctx.info_name}: {name}",
                hint=f"put options of vLLM after --: {ctx.command_path} ... -- {correct}",
            ) from error


def _correct(name: str) -> str | None:
    """Return the option of vLLM as it is spelt correctly, None if vLLM has none like it."""
    from coldstart.models import options

    if not options.list_options() or options.is_listed(name):
        return name
    near = options.find_similar(name.removeprefix("--"))
    return f"--{near[0]}" if near else None
