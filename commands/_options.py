"""Options that every subcommand has.

``@command()`` turns ``def command(common: Common, ...)`` into a function for typer with the function's own parameters,
then these. Arguments after ``--`` do not reach the parser; they are in ``common.vllm_args``.
"""

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.artifacts.net.origin import redact_url
from coldstart.commands import _declared
from coldstart.commands._completion import complete_model
from coldstart.commands._declared import declare_settings, list_parameters, take_settings
from coldstart.commands._output import Format, Output, Progress

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import AuthRequiredError, UsageError
from coldstart.scheduling.declaration import list_settings
from coldstart.system import paths
from coldstart.system.dry_run import dry_run
from coldstart.system.paths import Cache

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle, TrustCheck
    from coldstart.artifacts.store import Store

    from coldstart.models.inspection import Lookup

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: alias, Hugging Face repository, or local directory.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="Commit, branch or tag of a hub model; default: the newest commit."
    ),
]
Untrusted = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        help="Use a bundle without a trusted signature, except its code and the arguments that it records.",
    ),
]
OnMissing = Annotated[
    str,
    typer.Option(
        "--on-miss", metavar="fail|warn", help="Without a bundle: fail, or start stock vLLM with a warning."
    ),
]
READY_TIMEOUT = typer.Option(
    "--ready-timeout", metavar="SECONDS", help="Abort a start that takes longer than this."
)


@dataclass(frozen=True)
class Common:
    """Values of the common options: output, network access, cache, and vLLM's arguments.

    `typed_args` is true if `--` was typed, with or without arguments after it. `typed` are the names of the options on the
    command line, without those of the environment.
    """

    out: Output
    offline: bool
    cache: Cache
    vllm_args: Arguments
    typed_args: bool = False
    typed: frozenset[str] = frozenset()

    def store(self) -> "Store":
        """Return the bundle store below the cache root."""
        from coldstart.artifacts.store import Store

        return Store(self.cache.bundles)

    def get_bundle(self, ref: str) -> "Bundle":
        """Return the bundle that `ref` names, and print which one that is where a name has several versions.

        Raises the errors of `Store.find_by_reference`.
        """
        from coldstart.models import inspection

        bundle = self.store().find_by_reference(ref, trust=inspection.trust)
        self.note_version(ref, bundle.ref)
        return bundle

    def note_version(self, ref: str, selected: str) -> None:
        """Print which bundle, by its reference, was selected if `ref` is a name that several versions have."""
        from coldstart.artifacts.bundle import describe_choice

        from coldstart.models import inspection

        versions = [bundle for bundle in self.store().list_bundles() if bundle.identity[0] == ref]
        for bundle in versions if len(versions) > 1 else ():
            if bundle.ref == selected:
                self.out.note(f"Using {describe_choice(bundle, versions, inspection.trust)}")

    def look_up(
        self,
        model: str,
        revision: str | None = None,
        accepts: "TrustCheck | None" = None,
        *,
        adopts: bool = False,
    ) -> "Lookup":
        """Return the model, its key on this machine, and its bundle among those that `accepts` accepts.

        With `adopts`, the arguments are those of the bundle if `--` was not typed. Raises the errors of `resolver.resolve`.
        """
        from coldstart.models import resolver

        given = None if adopts and not self.typed_args else self.vllm_args
        return resolver.resolve(
            model, given, cache=self.cache, offline=self.offline, revision=revision, accepts=accepts
        )

    def format_command(self, *words: str) -> str:
        """Return the command line ``coldstart WORDS`` with the same vLLM arguments, which are part of the key."""
        from coldstart.system import secrets

        passed = ["--", *secrets.arguments(self.vllm_args)] if self.vllm_args else []
        return shlex.join(["coldstart", *words, *passed])

    def require_network(self, address: str) -> None:
        """Raise AuthRequiredError (exit code 4) if ``address`` is on the network and --offline is set."""
        if self.offline and "://" in address:
            raise AuthRequiredError(
                f"{redact_url(address)} is on the network, and --offline is set",
                hint="remove --offline",
            )


def option(
    *flags: str, help: str, metavar: str | None = None, envvar: str | None = None, show_envvar: bool = True
) -> Any:
    """Return the declaration of an option."""
    return typer.Option(*flags, help=help, metavar=metavar, envvar=envvar, show_envvar=show_envvar)


# The help of every command repeats these options without their variables.
_unbound_option = functools.partial(option, show_envvar=False)


_CACHE_DIR = option(
    "--cache-dir",
    help="Directory of bundles and caches; default: coldstart in $XDG_CACHE_HOME.",
    metavar="DIR",
    envvar=environment.CACHE_DIR,
)


def _common(
    format: Annotated[Format, _unbound_option("--format", help="Format of the result.")] = "text",
    output: Annotated[
        Path | None,
        _unbound_option(
            "--output",
            "-o",
            help="Write the printed result to this file; default: standard output.",
            metavar="FILE",
        ),
    ] = None,
    quiet: Annotated[bool, _unbound_option("--quiet", "-q", help="Print only the result.")] = False,
    verbose: Annotated[bool, _unbound_option("--verbose", "-v", help="Print more details.")] = False,
    progress: Annotated[
        Progress, _unbound_option("--progress", help="Format of progress messages.")
    ] = "auto",
    offline: Annotated[
        bool,
        _unbound_option(
            "--offline", help="Download and upload nothing; use models and bundles on this machine."
        ),
    ] = False,
    cache_dir: Annotated[Path | None, _CACHE_DIR] = None,
) -> tuple[Output, bool, Cache]:
    return Output(format, output, quiet, verbose, progress), offline, Cache.at(cache_dir)


def _exporting(
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            metavar="FORM[=FILE]",
            help="Print the result as json, csv, html or markdown; FORM=FILE writes a file. Repeatable.",
        ),
    ] = None,
) -> tuple[list[str] | None]:
    return (export,)


# Parameters of a command that are created from several options.
_GIVEN = ("common", "choice", "choices", "exports", "endpoint", "settings")
SHARED = tuple(inspect.signature(_common).parameters)


def group(text: str | None) -> typer.Typer:
    """Return a command with subcommands; `text` is its help."""
    return typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help=text,
    )


def command(
    *,
    takes_vllm_args: bool = False,
    chooses_scheduler: bool = False,
    compares_schedulers: bool = False,
    exports: bool = False,
    listens: bool = False,
    sets: object = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the common options, and rejects arguments after ``--`` unless the command takes them.

    A command that selects a scheduler receives a ``choice``, one that compares several their ``choices``, one with a result
    to export ``exports``, and one that listens for clients an ``endpoint``. One with options for the declared settings of the
    dataclass `sets` receives those that have a value as ``settings``; if `sets` is an object, its values are the defaults.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, **given: Any) -> None:
            rest = Arguments(ctx.obj or ())
            if rest and not takes_vllm_args:
                raise UsageError(f"{ctx.info_name} takes no arguments after --, found {' '.join(rest)!r}")
            typed = frozenset(name for name in given if _declared.is_typed(ctx, name))
            common = _common(**{name: given.pop(name) for name in SHARED})
            # Servers and templates take these arguments, and they need sockets.
            if takes_vllm_args and (notice := paths.describe_other_runtime_dir()):
                common[0].note(notice)
            _declared.resolve(ctx, given, common[0])
            if chooses_scheduler or compares_schedulers:
                from coldstart.scheduling import settings

                named = {name: given.pop(one.option) for name, one in settings.options(live=takes_vllm_args)}
                if chooses_scheduler:
                    given["choice"] = settings.SchedulerSettings(**named)
                else:
                    given["choices"] = _list_choices(**named)
            if exports:
                from coldstart.commands._export import Exports

                given["exports"] = Exports.parse(given.pop("export") or [])
            if listens:
                from coldstart.commands import _listen

                given["endpoint"] = _listen.create_endpoint(given, common[0])
            if sets is not None:
                given["settings"] = take_settings(sets, given)
            with dry_run() if given.get("dry_run") else nullcontext():
                function(Common(*common, rest, ctx.obj is not None, typed), **given)

        own = [one for one in list_parameters(function) if one.name not in _GIVEN]
        if sets is not None:
            own += declare_settings(sets, list_settings(sets))
        if listens:
            from coldstart.commands import _listen

            own += _listen.list_options()
        own = _declared.add_file_options(own)
        if chooses_scheduler or compares_schedulers:
            from coldstart.scheduling import settings

            policy = settings.AUTO if chooses_scheduler else [settings.AUTO]
            own += declare_settings(
                settings.SchedulerSettings(), settings.options(live=takes_vllm_args), policy=policy
            )
        own += list_parameters(_exporting) if exports else []
        _declare(run, [*own, *list_parameters(_common)])
        run.__dict__["takes_vllm_args"] = takes_vllm_args
        return run

    return decorate


def _list_choices(policy: Sequence[str], **named: Any) -> list[Any]:
    """Return the settings of each policy. An option that it ignores and another one uses keeps its default there."""
    from coldstart.scheduling.settings import SchedulerSettings, options

    policies = [SchedulerSettings(one).policy for one in policy]
    ignored = {name: {one for one in policies if one in setting.unused_by} for name, setting in options()}
    useless = {name for name, by in ignored.items() if by == {*policies}}
    return [
        SchedulerSettings(
            one, **{name: named[name] for name in named if one not in ignored[name] or name in useless}
        )
        for one in policies
    ]


def _declare(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *parameters]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
