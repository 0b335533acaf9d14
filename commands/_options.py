"""Options that all commands share.

``@command()`` turns a function with a parameter ``common: Common`` into a typer command with the function's own options,
followed by the common options. Arguments after ``--`` bypass the parser and are in ``common.vllm_args``.
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
from coldstart.commands._output import Format, Output, Progress, require_writable

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import AuthRequiredError, UsageError
from coldstart.scheduling.declaration import list_settings
from coldstart.system import paths, secrets
from coldstart.system.dry_run import dry_run
from coldstart.system.paths import Cache

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle, TrustCheck
    from coldstart.artifacts.store import Store

    from coldstart.models.inspection import BundleLookup

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: an alias, a Hugging Face repository, or a local directory.",
        autocompletion=complete_model,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REV",
        help="Commit, branch or tag of a Hugging Face model; default: the newest commit.",
    ),
]
Untrusted = Annotated[
    bool,
    typer.Option(
        "--untrusted",
        help="Also use bundles without a trusted signature, but ignore the code and the vLLM arguments in them.",
    ),
]
OnMissing = Annotated[
    str,
    typer.Option(
        "--on-miss",
        metavar="fail|warn",
        help="If there is no matching bundle: fail, or start stock vLLM with a warning.",
    ),
]


def require_positive(seconds: float | None) -> float | None:
    """Return the value of an option. Raises BadParameter if it is not above 0."""
    if seconds is not None and not seconds > 0:
        raise typer.BadParameter(f"{seconds:g} is not above 0")
    return seconds


READY_TIMEOUT = typer.Option(
    "--ready-timeout",
    callback=require_positive,
    metavar="SECONDS",
    help="Maximum duration of a start, in seconds; a longer start fails.",
)


@dataclass(frozen=True)
class Common:
    """Values of the common options: output, network access, cache directory, and vLLM arguments.

    `has_typed_args` is true if the command line contains `--`, even without arguments after it. `typed_options` contains the
    names of the options that are on the command line; options from environment variables are not included.
    """

    out: Output
    offline: bool
    cache: Cache
    vllm_args: Arguments
    has_typed_args: bool = False
    typed_options: frozenset[str] = frozenset()

    def store(self) -> "Store":
        """Return the bundle store below the cache root."""
        from coldstart.artifacts.store import Store

        return Store(self.cache.bundles)

    def get_bundle(self, ref: str) -> "Bundle":
        """Return the bundle with the reference `ref`, and print its version if several bundles have this name.

        Raises the errors of `Store.find_by_reference`.
        """
        from coldstart.models import inspection

        bundle = self.store().find_by_reference(ref, trust=inspection.trust)
        self.print_version_note(ref, bundle.ref)
        return bundle

    def print_version_note(self, ref: str, selected: str) -> None:
        """Print which version was selected if several versions have the name `ref`. `selected` is the full reference."""
        versions = {one.ref: one.version for one in self.store().list_bundles() if one.identity[0] == ref}
        if len(versions) > 1 and selected in versions:
            self.out.print_note(f"Using {ref}:v{versions[selected]} of {len(versions)} versions")

    def look_up(
        self,
        model: str,
        revision: str | None = None,
        accepts: "TrustCheck | None" = None,
        *,
        adopts: bool = False,
    ) -> "BundleLookup":
        """Return the model, its key on this machine, and the matching bundle that `accepts` trusts.

        With `adopts`, the vLLM arguments come from the bundle unless `--` is on the command line. Raises the errors of
        `resolver.look_up_for_start`.
        """
        from coldstart.models import resolver

        vllm_args = None if adopts and not self.has_typed_args else self.vllm_args
        return resolver.look_up_for_start(
            model, vllm_args, cache=self.cache, offline=self.offline, revision=revision, accepts=accepts
        )

    def format_command(self, *words: str) -> str:
        """Return the command line `coldstart WORDS`, with the vLLM arguments of this command appended."""
        passed = ["--", *secrets.redact_arguments(self.vllm_args)] if self.vllm_args else []
        return shlex.join(["coldstart", *words, *passed])

    def require_network(self, address: str) -> None:
        """Raise AuthRequiredError (exit code 4) if ``address`` is on the network and --offline is set."""
        if self.offline and "://" in address:
            raise AuthRequiredError(
                f"cannot access {redact_url(address)}: --offline is set",
                hint="remove --offline",
            )


# Options that every command repeats in its help, without their environment variables.
_unbound_option = functools.partial(typer.Option, show_envvar=False)


_CACHE_DIR = typer.Option(
    "--cache-dir",
    help="Root directory of bundles and caches; default: $XDG_CACHE_HOME/coldstart.",
    metavar="DIR",
    envvar=environment.CACHE_DIR,
)


_FORMAT = _unbound_option("--format", help="Format of the result.")


def _common(
    format: Annotated[Format, _FORMAT] = "text",
    output: Annotated[
        Path | None,
        _unbound_option(
            "--output",
            "-o",
            help="Write the result to this file; default: standard output.",
            metavar="FILE",
        ),
    ] = None,
    quiet: Annotated[bool, _unbound_option("--quiet", "-q", help="Print only the result.")] = False,
    verbose: Annotated[
        bool, _unbound_option("--verbose", "-v", help="Print additional details on stderr.")
    ] = False,
    progress: Annotated[
        Progress, _unbound_option("--progress", help="Format of progress messages.")
    ] = "auto",
    offline: Annotated[
        bool,
        _unbound_option(
            "--offline", help="Do not use the network; use only models and bundles on this machine."
        ),
    ] = False,
    cache_dir: Annotated[Path | None, _CACHE_DIR] = None,
) -> tuple[Output, bool, Cache]:
    if output is not None:
        require_writable(output)
    return Output(format, output, quiet, verbose, progress), offline, Cache.at(cache_dir)


# Parameters of a command that are assembled from several options.
_ASSEMBLED = ("common", "choice", "choices")
SHARED = tuple(inspect.signature(_common).parameters)


def group(text: str | None, **more: Any) -> typer.Typer:
    """Create a command group. `text` is its help text, and `more` contains further arguments of `typer.Typer`."""
    return typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        help=text,
        **more,
    )


def command(
    *,
    takes_vllm_args: bool = False,
    chooses_scheduler: bool = False,
    compares_schedulers: bool = False,
    formats: Any = Format,
    **structs: object,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that turns a function into a command with the common options.

    Args:
        takes_vllm_args: Accept vLLM arguments after ``--``, which are rejected otherwise.
        chooses_scheduler: Add the scheduler options; the function receives them as ``choice``.
        compares_schedulers: Add repeatable scheduler options; the function receives ``choices``.
        formats: Literal type of the values of ``--format``.
        structs: Maps a parameter of the function to a dataclass, or to an instance that supplies defaults. Its declared
            settings become options. The parameter receives those that have a value.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(ctx: typer.Context, **given: Any) -> None:
            rest = Arguments(ctx.obj or ())
            if rest and not takes_vllm_args:
                raise UsageError(
                    f"{ctx.info_name} takes no arguments after --, but got {' '.join(rest)!r}",
                    hint="remove -- and the arguments after it",
                )
            typed = frozenset(name for name in given if _declared.is_typed(ctx, name))
            common = _common(**{name: given.pop(name) for name in SHARED})
            # Servers and templates take these arguments, and they need sockets.
            if takes_vllm_args and (notice := paths.describe_other_runtime_dir()):
                common[0].print_note(notice)
            _declared.resolve_keys(ctx, given, common[0])
            if chooses_scheduler or compares_schedulers:
                from coldstart.scheduling import settings

                declared = settings.list_command_options(with_live_only=takes_vllm_args)
                named = {name: given.pop(one.option) for name, one in declared}
                if chooses_scheduler:
                    given["choice"] = settings.SchedulerSettings(**named)
                else:
                    given["choices"] = _list_choices(**named)
            given |= {name: take_settings(struct, given) for name, struct in structs.items()}
            with dry_run() if given.get("dry_run") else nullcontext():
                function(Common(*common, rest, ctx.obj is not None, typed), **given)

        own = [one for one in list_parameters(function) if one.name not in {*_ASSEMBLED, *structs}]
        for struct in structs.values():
            own += declare_settings(struct, list_settings(struct))
        own = _declared.add_file_options(own)
        if chooses_scheduler or compares_schedulers:
            from coldstart.scheduling import settings

            policy = settings.AUTO if chooses_scheduler else [settings.AUTO]
            own += declare_settings(
                settings.SchedulerSettings(),
                settings.list_command_options(with_live_only=takes_vllm_args),
                policy=policy,
            )
        format_option, *shared = list_parameters(_common)
        format_option = format_option.replace(annotation=Annotated[formats, _FORMAT])
        _declare(run, [*own, format_option, *shared])
        run.__dict__["takes_vllm_args"] = takes_vllm_args
        return run

    return decorate


def _list_choices(policy: Sequence[str], **named: Any) -> list[Any]:
    """Return the settings of each policy. An option that only other policies use keeps its default."""
    from coldstart.scheduling.settings import SchedulerSettings, list_command_options

    policies = [SchedulerSettings(one).policy for one in policy]
    ignored = {
        name: {one for one in policies if one in setting.unused_by_policies}
        for name, setting in list_command_options()
    }
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
