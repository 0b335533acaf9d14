"""Entry point of the command line: load the requested command, run it, and turn exceptions into exit codes.

Invariant: ``coldstart --help`` imports no command module, and ``coldstart CMD --help`` imports only its own. Neither imports
torch, vllm or pandas. Each module in COMMANDS defines ``command`` (a function) or ``app`` (a typer.Typer with subcommands).
"""

import difflib
import errno
import importlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import CompletionItem, TyperCommand, TyperGroup  # type: ignore[attr-defined]

import coldstart
from coldstart.contract import environment
from coldstart.errors import ERROR, ColdstartError, UsageError
from coldstart.system import paths

# Commands of each heading of the help, with their one-line summaries.
HEADINGS: Mapping[str, Mapping[str, str]] = {
    "Cold start": {
        "up": "Build, prepare and serve a model with one command.",
        "down": "Stop the servers and templates that up started.",
        "materialize": "Build the bundle of a model, once, offline.",
        "serve": "Start a vLLM server from a bundle.",
        "host": "Serve many models behind one endpoint.",
        "template": "Manage warm processes that fork servers.",
        "prefetch": "Fetch weights into memory before a server starts.",
        "fleet": "Serve models on many servers.",
    },
    "Bundles": {
        "inspect": "Show a bundle, a key, or why no bundle matches.",
        "list": "List the bundles in the store.",
        "prune": "Remove old versions of bundles.",
        "export": "Write a bundle to one file.",
        "import": "Add the bundles of one file to the store.",
        "push": "Copy a bundle to a directory, registry or hub.",
        "pull": "Copy a bundle from a directory, registry or hub.",
        "validate": "Check bundles, optionally by starting servers.",
    },
    "Measure": {
        "bench": "Measure and compare cold starts of all modes.",
        "trace-replay": "Replay a request trace, live or simulated.",
    },
    "Machine": {
        "trust": "Manage the keys whose bundles may run code on this machine.",
        "install": "Install vLLM or another extra of coldstart.",
        "doctor": "Report what this machine supports, and what is missing.",
    },
}
COMMANDS: Mapping[str, str] = {name: text for group in HEADINGS.values() for name, text in group.items()}
# Module and function of each command that has no module of its own.
_COMMAND_FUNCTIONS: Mapping[str, tuple[str, str]] = {
    "list": ("bundles", "list_bundles"),
    "prune": ("bundles", "prune"),
    "export": ("bundles", "export"),
    "import": ("bundles", "import_"),
    "push": ("bundles", "push"),
    "pull": ("bundles", "pull"),
    "install": ("machine", "install"),
    "doctor": ("machine", "doctor"),
}
# Extra of coldstart that each command needs, if any.
EXTRAS: Mapping[str, str] = {"host": "host", "fleet": "fleet", "trace-replay": "lab"}
# Hint for each error number of the operating system.
_ERRNO_HINTS: Mapping[int, str] = {
    errno.ENOENT: "use a path that exists",
    errno.EISDIR: "use a file, not a directory",
    errno.ENOTDIR: "use a directory, not a file",
    errno.EACCES: "run as the owner of the file, or use another path",
    errno.EPERM: "run as the owner of the file, or use another path",
    errno.EROFS: "use a writable disk: --cache-dir DIR",
    errno.ENOSPC: "free space with coldstart prune, or use another disk: --cache-dir DIR",
}
VLLM_ARGUMENTS_USAGE = "[-- VLLM_ARGUMENTS]"
_UNWRITABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)


class LazyGroup(TyperGroup):
    """Command group that imports a command only when it runs or prints its help."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names of all commands in the order of COMMANDS."""
        return list(COMMANDS)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments before the command name, and fail with a hint if an option belongs after it."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = _find_unknown_option(error)
            if option is None:
                raise
            ctx.fail(f"No such option: {option}. Options follow the command: coldstart COMMAND {option}")

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Load one command. If the name is unknown, fail and suggest the most similar one."""
        if cmd_name not in COMMANDS:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            ctx.fail(f"No such command {cmd_name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return load(cmd_name)

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:  # type: ignore[override]
        """Complete command names from COMMANDS without importing a command."""
        names = [name for name in COMMANDS if name.startswith(incomplete)]
        items = [CompletionItem(name, help=COMMANDS[name]) for name in names]
        return [*items, *super(TyperGroup, self).shell_complete(ctx, incomplete)]

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the commands by heading without importing a command."""
        for heading, group in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl(list(group.items()))


class VllmArgsCommand(TyperCommand):
    """Command that passes the arguments after `--` to vLLM unparsed."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line that follow the command name."""
        return [*super().collect_usage_pieces(ctx), VLLM_ARGUMENTS_USAGE]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments.

        Raises:
            UsageError: An unknown option does not resemble an option of the command, so it probably belongs to vLLM.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flags = [flag for param in self.get_params(ctx) for flag in (*param.opts, *param.secondary_opts)]
            name = _find_unknown_option(error)
            if name is None or difflib.get_close_matches(name, flags, cutoff=0.8):
                raise
            raise UsageError(
                f"{ctx.info_name} has no option {name}",
                hint=f"put vLLM options after --: {ctx.command_path} ... -- {name}",
            ) from error


def _find_unknown_option(error: Exception) -> str | None:
    # Typer does not export this class. Its other option errors concern known options.
    return getattr(error, "option_name", None) if type(error).__name__ == "NoSuchOption" else None


def find_module_name(name: str) -> str:
    """Return the full name of the module that implements a command."""
    return f"coldstart.commands.{_COMMAND_FUNCTIONS.get(name, [name.replace('-', '_')])[0]}"


def load(name: str) -> Any:
    """Import the command object of one entry of COMMANDS, and return it."""
    from coldstart.commands import _examples

    module = importlib.import_module(find_module_name(name))
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
        command = getattr(module, _COMMAND_FUNCTIONS[name][1] if name in _COMMAND_FUNCTIONS else "command")
        app.command(name, help=command.__doc__ if name in _COMMAND_FUNCTIONS else module.__doc__)(command)
    for registered in app.registered_commands:
        passes = getattr(registered.callback, "takes_vllm_args", False)
        registered.cls = VllmArgsCommand if passes else TyperCommand
    loaded = typer.main.get_command(app)
    loaded.name = name
    _examples.add_examples(loaded, name)
    # The group gets no variables: COLDSTART_VERSION in a container would otherwise set --version.
    prefix = f"{environment.PREFIX}_{name}".upper().replace("-", "_")
    loaded.context_settings["auto_envvar_prefix"] = prefix
    return loaded


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"coldstart {coldstart.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Arguments after -- go to vLLM unchanged. Exit codes: 0 success, 1 failed check, 2 error, 3 no bundle, 4 login."
)
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Do the work of a vLLM start ahead of time, store it in bundles, and start vLLM servers from them."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    _replace_closed_streams()
    own_args, vllm_args = _split_vllm_args(sys.argv[1:] if argv is None else list(argv))
    # Other users must not be able to write the files that are created here.
    os.umask(os.umask(0o077) | 0o022)
    install_signal_handlers()
    _ignore_service_variables()
    as_json = False
    try:
        as_json = _find_format(own_args) == "json"
        # With standalone_mode, the parser itself would print its errors as text.
        code = app(own_args, prog_name="coldstart", obj=vllm_args, standalone_mode=not as_json)
    except Exception as error:  # noqa: BLE001 - here each failure becomes an exit code
        sys.exit(_report_error(error, own_args, as_json=as_json))
    sys.exit(code or 0)


def _replace_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed, so that no other file takes its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _find_format(argv: Sequence[str]) -> str | None:
    """Return the output format set by `argv` or the environment, even if the parser rejects `argv`."""
    formats = [value for argument, value in itertools.pairwise(argv) if argument == "--format"]
    formats += [argument.partition("=")[2] for argument in argv if argument.startswith("--format=")]
    if formats:
        return formats[-1]
    command = [argument for argument in argv if not argument.startswith("-")][:2]
    if command[:1] == ["host"]:  # `coldstart host MODEL` uses the format of `coldstart host run`
        with suppress(ModuleNotFoundError):  # the error that follows names the extra
            command = command if command[1:] and command[1] in load("host").commands else ["host", "run"]
    prefixes = ["_".join([environment.PREFIX, *command[:count]]) for count in range(1, len(command) + 1)]
    variables = [f"{prefix}_format".upper().replace("-", "_") for prefix in prefixes]
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def _ignore_service_variables() -> None:
    """Remove and report Kubernetes service variables whose names collide with variables of this program's options."""
    if dropped := environment.drop_service_variables(os.environ, f"{environment.PREFIX}_"):
        from coldstart.commands._output import Output

        names = ", ".join(dropped)
        Output().warn(f"ignored {names}: set by Kubernetes for a service, not an option of coldstart")


def _split_vllm_args(argv: list[str]) -> tuple[list[str], list[str] | None]:
    # Split here: the parser would read the arguments after -- as its own.
    if "--" not in argv:
        return argv, None
    separator = argv.index("--")
    return argv[:separator], argv[separator + 1 :]


class _StoppedBySignal(SystemExit):
    """Exit with code 128 + signal. Handlers of Exception do not catch it, and every finally block runs."""


def install_signal_handlers() -> None:
    """Exit with code 128 + signal on SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: _raise_stopped(128 + number))
    # Another library's hook, such as a partial, may have no name.
    if getattr(sys.unraisablehook, "__name__", None) != "_raise_dropped_exit":
        previous_hook = sys.unraisablehook

        def _raise_dropped_exit(unraisable: Any) -> None:
            # Python drops exceptions raised in a weak reference's callback or in __del__, which often run during imports.
            if isinstance(unraisable.exc_value, _StoppedBySignal):
                code = unraisable.exc_value.args[0]
                signal.signal(signal.SIGALRM, lambda *_: _raise_stopped(code))
                signal.setitimer(signal.ITIMER_REAL, 0.01)
            else:
                previous_hook(unraisable)

        sys.unraisablehook = _raise_dropped_exit


def _raise_stopped(code: int) -> NoReturn:
    raise _StoppedBySignal(code)


def _report_error(error: Exception, argv: Sequence[str] = (), *, as_json: bool = False) -> int:
    if environment.DEBUG.read():
        traceback.print_exception(error)
    from coldstart.commands._output import print_error

    missing = _describe_missing_module(error, argv) if isinstance(error, ModuleNotFoundError) else None
    lines, hint, code = missing or _describe_error(error)
    print_error(lines, hint, code if as_json else None)
    return code


def _describe_missing_module(
    error: ModuleNotFoundError, argv: Sequence[str]
) -> tuple[Sequence[str], str, int] | None:
    """Return an error and a hint to install the extra with the missing module, or None if no extra provides it."""
    from coldstart.system.installation import find_extras

    module = error.name or ""
    extras = find_extras(module)
    if not extras:
        return None
    command = next((word for word in argv if word in COMMANDS), None)
    extra = EXTRAS.get(command or "", extras[0])
    requester = f"coldstart {command}" if command else "this command"
    return (
        [f"{requester} requires {module}, which is not installed"],
        f"run `coldstart install {extra}`",
        ERROR,
    )


def _describe_error(error: Exception) -> tuple[Sequence[str], str | None, int]:
    if isinstance(error, ColdstartError):
        code = getattr(error, "code", None)  # a number is the exit code of a process
        first, *more = error.lines
        return [first + (f" [{code}]" if isinstance(code, str) else ""), *more], error.hint, error.exit_code
    if describe := getattr(error, "format_message", None):  # an error of the parser
        context = getattr(error, "ctx", None)
        return [describe()], f"see `{context.command_path} --help`" if context else None, ERROR
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        hint = _ERRNO_HINTS.get(error.errno or 0)
        if isinstance(error.filename, str) and paths.is_below_home(error.filename):
            hint = paths.NO_HOME_HINT if error.errno in _UNWRITABLE_ERRNOS else hint
        return [f"{place}{error.strerror}"], hint, ERROR
    return (
        [f"internal error: {type(error).__name__}: {error}"],
        "run it again with COLDSTART_DEBUG=1 and report the output",
        ERROR,
    )


if __name__ == "__main__":
    main()
