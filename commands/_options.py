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
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from coldstart.artifacts.net.origin import without_secrets
from coldstart.commands._output import Format, Output, Progress

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import NeedsAuth, Usage
from coldstart.machine.paths import Cache

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Trust
    from coldstart.artifacts.store import Store
    from coldstart.commands._export import Exports

    from coldstart.key.inspection import Lookup
    from coldstart.scheduling.settings import Choice

KvStrategy = Literal["proactive", "reactive", "recompute"]
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
Port = Annotated[int, typer.Option("--port", metavar="N", help="Port to listen at; 0: any that is free.")]
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
    """What every command was given: the sink, whether the network is off, the cache, and vLLM's arguments."""

    out: Output
    offline: bool
    cache: Cache
    vllm_args: Arguments

    def store(self) -> "Store":
        """The bundle store under the chosen cache root."""
        from coldstart.artifacts.store import Store

        return Store(self.cache.bundles)

    def look_up(self, model: str, revision: str | None = None, accepts: "Trust | None" = None) -> "Lookup":
        """The model with these arguments, its key on this machine, and its bundle among what `accepts` accepts.

        Raises what models.resolve raises.
        """
        from coldstart.key import inspection

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
        from coldstart.machine import secrets

        passed = ["--", *secrets.arguments(self.vllm_args)] if self.vllm_args else []
        return shlex.join(["coldstart", *words, *passed])

    def require_network(self, address: str) -> None:
        """Raises NeedsAuth (exit 4) when ``address`` lies on the network and --offline is set."""
        if self.offline and "://" in address and not address.startswith("dir://"):
            raise NeedsAuth(
                f"{without_secrets(address)} lies on the network, and --offline is set.",
                mend="leave --offline away",
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


def _scheduling(
    scheduler: Annotated[
        str,
        typer.Option(
            "--scheduler",
            help="Which request runs next: fcfs (vLLM's own) or skip-join-mlfq; auto is fcfs.",
            metavar="NAME",
        ),
    ] = "auto",
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", metavar="N", min=1, help="Requests per iteration at most; default: the engine's."
        ),
    ] = None,
    quantum: Annotated[
        float | None,
        typer.Option("--quantum", help="The first queue's; default: by the profile.", metavar="SECONDS"),
    ] = None,
    eta: Annotated[
        int | None,
        typer.Option("--eta", metavar="N", min=1, help="Queues that a demotion skips at least; default: 1."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            "--alpha", help="Unserved this long: to the first queue; default: 0.3.", metavar="SECONDS"
        ),
    ] = None,
    oldest_share: Annotated[
        float | None,
        typer.Option(
            "--oldest-share",
            help="Of the time, in order of arrival: bounds what long requests pay; default: 0.",
            metavar="SHARE",
        ),
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(
            "--reserve", help="Of recent arrivals' KV that is kept free; default: 0.9.", metavar="QUANTILE"
        ),
    ] = None,
    kv_strategy: Annotated[
        KvStrategy | None,
        typer.Option(
            "--kv-strategy",
            help="What becomes of KV that does not fit; default: proactive; recompute with fcfs.",
        ),
    ] = None,
    kv_host_memory: Annotated[
        int | None, typer.Option("--kv-host-memory", help="Host memory for that KV.", metavar="BYTES")
    ] = None,
) -> tuple[Any, ...]:
    return (
        scheduler,
        batch,
        quantum,
        eta,
        alpha,
        oldest_share,
        reserve,
        kv_strategy,
        kv_host_memory,
    )


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
                raise Usage(f"{ctx.info_name} takes nothing after --, found {' '.join(rest)!r}.")
            common = _common(**{name: given.pop(name) for name in SHARED})
            if chooses_scheduler:
                given["choice"] = _choice(given)
            if exports:
                given["exports"] = _exports(given.pop("export"))
            function(Common(*common, vllm_args=rest), **given)

        wanted = ((_scheduling, chooses_scheduler), (_exporting, exports))
        _declare(run, function, [more for more, really in wanted if really])
        return run

    return decorate


def _choice(given: dict[str, Any]) -> "Choice":
    from coldstart.scheduling.settings import Choice

    return Choice(
        *_scheduling(**{name: given.pop(name) for name in inspect.signature(_scheduling).parameters})
    )


def _exports(given: list[str] | None) -> "Exports":
    from coldstart.commands._export import Exports

    return Exports.parse(given or [])


def _declare(
    run: Callable[..., None], function: Callable[..., None], more: Sequence[Callable[..., Any]]
) -> None:
    made_here = ("choice", "exports")
    own = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.name not in made_here]
    groups = [*more, _common]
    shared = [parameter for group in groups for parameter in inspect.signature(group).parameters.values()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", keyword, annotation=typer.Context)
    parameters = [context, *(parameter.replace(kind=keyword) for parameter in [*own, *shared])]
    hints = {
        **get_type_hints(function, include_extras=True),
        **{
            name: hint
            for group in groups
            for name, hint in get_type_hints(group, include_extras=True).items()
        },
        "ctx": typer.Context,
        "return": None,
    }
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
