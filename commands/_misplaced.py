"""Command that passes the arguments after `--` on to vLLM; the hint of an option that it does not know names that place."""

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
        """Parse the arguments. Raises UsageError for an option that may be one of vLLM."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The class is private to typer.
            if type(error).__name__ != "NoSuchOption":
                raise
            name: str = error.option_name  # type: ignore[attr-defined]
            own = [flag for one in self.get_params(ctx) for flag in (*one.opts, *one.secondary_opts)]
            if difflib.get_close_matches(name, own, cutoff=0.8):
                raise
            raise UsageError(
                f"No such option of {ctx.info_name}: {name}",
                hint=f"put options of vLLM after --: {ctx.command_path} ... -- {name}",
            ) from error
