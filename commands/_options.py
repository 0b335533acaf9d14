"""The options every subcommand has, as one piece.

``@command()`` turns ``def command(common: Common, ...)`` into what typer sees: the function's own parameters,
then these. What follows ``--`` never reaches the parser; it is in ``common.vllm_args``.
"""

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from coldstart.artifacts.net.origin import without_secrets
from coldstart.commands import _keys
from coldstart.commands._output import Format, Output, Progress

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import AuthRequiredError, UsageError
from coldstart.system.paths import Cache

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Trust
    from coldstart.artifacts.store import Store
    from coldstart.commands._export import Exports

    from coldstart.models.inspection import Lookup
    from coldstart.scheduling.settings import SchedulerSettings

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Alias, repository id, or local directory.")]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="Commit, branch or tag of a hub model; default: its newest."
    ),
]
Untrusted = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        help="Take a bundle that nobody trusted has signed; its code is left alone all the same.",
    ),
]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen at.")]
Port = Annotated[
    int,
    typer.Option("--port", min=0, max=65535, metavar="N", help="Port to listen at; 0: any that is free."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", help="Ask every client for this key; default: for none."),
]
OnMissing = Annotated[
    str,
    typer.Option(
        "--on-miss", metavar="fail|warn", help="Without a bundle: refuse, or start the ordinary way."
    ),
]
Baseline = Annotated[
    Path | None, typer.Option("--baseline", metavar="FILE", help="A saved JSON result to compare with.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Of all that is drawn: arrivals, models, prompts.")
]
Gaps = Annotated[float, typer.Option("--cv", metavar="CV", help="CV of the gaps of a --rate; 1 is Poisson.")]
READY_TIMEOUT = typer.Option("--ready-timeout", metavar="SECONDS", help="Give up a start that takes longer.")

# Help of the word with which a process's memory leaves this machine.
SNAPSHOT = "Send a bundle although it holds a process's memory, which whoever gets it can read."


@dataclass(frozen=True)
class Common:
    """What every command was given: the sink, whether the network is off, the cache, and vLLM's arguments.

    `typed_args` is whether `--` was typed, with or without arguments behind it.
    """

    out: Output
    offline: bool
    cache: Cache
    vllm_args: Arguments
    typed_args: bool = False

    def store(self) -> "Store":
        """The bundle store under the chosen cache root."""
        from coldstart.artifacts.store import Store

        return Store(self.cache.bundles)

    def look_up(self, model: str, revision: str | None = None, accepts: "Trust | None" = None) -> "Lookup":
        """The model with these arguments, its key on this machine, and its bundle among what `accepts` accepts.

        Raises what models.resolve raises.
        """
        from coldstart.models import inspection

        return inspection.look_up(
            model,
            self.vllm_args,
            cache=self.cache,
            offline=self.offline,
            revision=revision,
            accepts=accepts,
        )

    def again(self, *words: str) -> str:
        """``coldstart WORDS`` with the same arguments of vLLM, which are part of the key, as it can be typed."""
        from coldstart.system import secrets

        passed = ["--", *secrets.arguments(self.vllm_args)] if self.vllm_args else []
        return shlex.join(["coldstart", *words, *passed])

    def require_network(self, address: str) -> None:
        """Raises AuthRequiredError (exit 4) when ``address`` lies on the network and --offline is set."""
        if self.offline and "://" in address and not address.startswith("dir://"):
            raise AuthRequiredError(
                f"{without_secrets(address)} lies on the network, and --offline is set.",
                hint="leave --offline away",
            )


def _option(*flags: str, help: str, metavar: str | None = None, envvar: str | None = None) -> Any:
    return typer.Option(*flags, help=help, metavar=metavar, envvar=envvar, show_envvar=envvar is not None)


_CACHE_DIR = _option(
    "--cache-dir",
    help="Root of bundles and built models; default: coldstart in $XDG_CACHE_HOME.",
    metavar="DIR",
    envvar=environment.CACHE_DIR,
)
_CONFIG = _option(
    "--config",
    help="Configuration file (TOML); default: coldstart/config.toml in $XDG_CONFIG_HOME.",
    metavar="FILE",
    envvar=environment.CONFIG,
)


def _common(
    format: Annotated[Format, _option("--format", help="Form of the result.")] = "text",
    output: Annotated[
        Path | None,
        _option(
            "--output", "-o", help="Write the result to this file; default: standard output.", metavar="FILE"
        ),
    ] = None,
    quiet: Annotated[bool, _option("--quiet", "-q", help="Say nothing but the result.")] = False,
    verbose: Annotated[bool, _option("--verbose", "-v", help="Say more.")] = False,
    progress: Annotated[Progress, _option("--progress", help="How to show progress.")] = "auto",
    offline: Annotated[bool, _option("--offline", help="Never ask the network.")] = False,
    cache_dir: Annotated[Path | None, _CACHE_DIR] = None,
    config: Annotated[Path | None, _CONFIG] = None,
) -> tuple[Output, bool, Cache]:
    # config was read before parsing began, because it gives the defaults; it is an option for help's sake.
    return Output(format, output, quiet, verbose, progress), offline, Cache.at(cache_dir)


def _exporting(
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            metavar="FORM[=FILE]",
            help="Give the result as json, csv, html or markdown; FORM=FILE writes one more report,"
            " also as parquet. Repeatable.",
        ),
    ] = None,
) -> tuple[list[str] | None]:
    return (export,)


SHARED = tuple(inspect.signature(_common).parameters)


def group(text: str | None) -> typer.Typer:
    """A command that has commands; `text` is its help."""
    return typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help=text,
    )


def command(
    *, takes_vllm_args: bool = False, chooses_scheduler: bool = False, exports: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options; refuse arguments after ``--`` unless it takes them.

    One that chooses a scheduler is given a ``choice`` of it, one whose result can be exported its ``exports``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, **given: Any) -> None:
            rest = Arguments(ctx.obj or ())
            if rest and not takes_vllm_args:
                raise UsageError(f"{ctx.info_name} takes nothing after --, found {' '.join(rest)!r}.")
            common = _common(**{name: given.pop(name) for name in SHARED})
            _keys.resolve(ctx, given, common[0])
            if chooses_scheduler:
                given["choice"] = _choice(given)
            if exports:
                given["exports"] = _exports(given.pop("export"))
            function(Common(*common, vllm_args=rest, typed_args=ctx.obj is not None), **given)

        own = [one for one in _parameters(function) if one.name not in ("common", "choice", "exports")]
        own = _keys.add_file_options(own)
        scheduling = _scheduler_options() if chooses_scheduler else []
        exporting = _parameters(_exporting) if exports else []
        _declare(run, [*own, *scheduling, *exporting, *_parameters(_common)])
        run.__dict__["takes_vllm_args"] = takes_vllm_args
        return run

    return decorate


def _scheduler_options() -> list[inspect.Parameter]:
    from coldstart.scheduling import settings

    types, default = get_type_hints(settings.SchedulerSettings), settings.SchedulerSettings()
    return [
        inspect.Parameter(
            one.option,
            inspect.Parameter.KEYWORD_ONLY,
            default=settings.AUTO if name == "policy" else getattr(default, name),
            annotation=Annotated[types[name], typer.Option(one.flag, help=one.help, metavar=one.unit)],
        )
        for name, one in settings.options()
    ]


def _choice(given: dict[str, Any]) -> "SchedulerSettings":
    from coldstart.scheduling.settings import SchedulerSettings, options

    return SchedulerSettings(**{name: given.pop(one.option) for name, one in options()})


def _exports(given: list[str] | None) -> "Exports":
    from coldstart.commands._export import Exports

    return Exports.parse(given or [])


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _declare(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *parameters]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
