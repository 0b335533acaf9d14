"""Serve many models behind one HTTP endpoint. A model starts on its first request and is evicted when memory is needed."""

import difflib
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands import _host_live
from coldstart.commands._listen import create_endpoint
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare
from typer.core import TyperGroup

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint, GatewayLimits
from coldstart.host.specification import HostSettings
from coldstart.units import format_memory, require_unit

if TYPE_CHECKING:
    from coldstart.host.configuration import Adopt, HostFile, Profiles

RUN = "run"


class _HostGroup(TyperGroup):
    """Command group that runs `coldstart host MODEL...` as `coldstart host run MODEL...`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Insert `run` unless the first argument is a command."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = group(
    __doc__,
    cls=_HostGroup,
    epilog="coldstart host MODEL... is short for coldstart host run MODEL..., which also accepts a MODEL named like a command.",
)


@app.command(RUN, help="Run the host until it is stopped. This is the default command.")
@declare(takes_vllm_args=True, settings=HostSettings, gateway=GatewayEndpoint(), limits=GatewayLimits())
def run(
    common: Common,
    settings: dict[str, Any],
    gateway: dict[str, Any],
    limits: dict[str, Any],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="Models: aliases, Hugging Face repositories, or local directories."
        ),
    ] = None,
    host_file: Annotated[
        Path | None,
        typer.Option(
            "--host-file",
            metavar="FILE",
            help="TOML file with settings and models; the host reloads it when it changes.",
        ),
    ] = None,
    idle: Annotated[
        float | None,
        typer.Option(
            "--idle",
            metavar="SECONDS",
            help="Stop a model given on the command line after this many seconds without a request; default: never.",
        ),
    ] = None,
    on_miss: Annotated[
        str | None,
        typer.Option(
            "--on-miss",
            metavar="fail|warn",
            help="If a model has no matching bundle: fail, or start stock vLLM with a warning; default: fail. `on_miss` of a"
            " model in the host file takes precedence.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            help="Maximum time for running requests to finish after SIGTERM, in seconds; default: no limit.",
        ),
    ] = None,
) -> None:
    """Run the host until it is stopped."""
    from coldstart.commands import _serving

    from coldstart.host import configuration
    from coldstart.host.live import profiles
    from coldstart.system.devices import hardware

    endpoint = create_endpoint(gateway, limits, common.out)
    if not models and host_file is None:
        raise UsageError(
            "no model is specified for the host",
            hint="run `coldstart host MODEL... --memory 60GiB`, or use --host-file FILE",
        )
    for argument in models or ():
        _require_model_name(argument)
    memory = settings.get("memory")
    if memory is None and host_file is None:
        raise UsageError(
            "--memory is required: it limits the memory that all models may use together",
            hint=f"use --memory 60GiB, or {environment.PREFIX}_HOST_RUN_MEMORY=60GiB",
        )
    typed = settings if on_miss is None else {**settings, "on_miss": on_miss}
    model_options: dict[str, Any] = {} if idle is None else {"idle_s": idle}
    # Without `--`, each model gets the arguments of its newest trusted bundle.
    model_options |= {"args": list(common.vllm_args)} if common.has_typed_args else {}
    if model_options and not models:
        raise UsageError(
            "--idle and arguments after -- apply only to models on the command line, which contains none",
            hint=f"set idle_s and args in {host_file}",
        )
    if memory is not None:
        require_unit(memory, "--memory", hint=f"use --memory {memory.strip()}MiB")
    typed["models"] = dict.fromkeys(models or (), model_options)

    bundle_profiles = profiles.create_profile_reader(common.cache, offline=common.offline)
    adopt = partial(profiles.read_bundle_arguments, cache=common.cache, offline=common.offline)

    def read(read_profile: "Profiles", adopt: "Adopt | None") -> "HostFile":
        if host_file is None:
            return profiles.share_gpus(configuration.parse(typed, read_profile, adopt))
        file = profiles.fill_in_device_memory(configuration.load(host_file, read_profile, typed, adopt))
        size = file.settings.memory
        require_unit(size, f"host file {host_file}: memory", hint=f'write memory = "{size}MiB"')
        return profiles.share_gpus(file)

    def read_file() -> "HostFile":
        return read(bundle_profiles, adopt)

    # Report errors of the options before models are looked up, and those of models before the slow imports of the server.
    if models:
        read(lambda launch: configuration.Profile(1, 0.0, "none"), None)
    file = read_file()
    for name, lender in file.argument_sources.items():
        if arguments := file.catalogue.launches[name].args:
            _serving.print_adopted_arguments(common, lender, arguments)
    limits_notes = configuration.describe_limits(
        file, hardware.find_engine_memory_capacity(), profiles.find_template_bytes()
    )
    for note in (*file.notes, *limits_notes):
        common.out.warn(note)
    if endpoint.client_keys is not None:
        for note in endpoint.client_keys.describe_unknown_models(file.catalogue):
            common.out.warn(note)
    if endpoint.has_no_admin_key():
        warning = (
            "no API key permits admin requests such as `coldstart host status` and `coldstart host stop`"
        )
        common.out.warn(f"{warning} (hint: --api-key-file FILE, or admin = true for a client)")

    from coldstart.host.live.log import Log
    from coldstart.host.live.run import ModelHost

    def announce(url: str, file: "HostFile") -> None:
        names, size = list(file.catalogue.launches), format_memory(file.settings.memory)
        document = {"url": url, "models": names, "memory_bytes": file.settings.memory}
        first = f"{url}  host of {', '.join(names)}, memory limit {size}"
        common.out.print_result(document, f"{first}\n{url}/ui  page of the host for a browser")

    host = ModelHost(
        file,
        read_file,
        common.cache,
        Log(quiet=common.out.quiet),
        announce,
        endpoint=endpoint,
        config_path=host_file,
        offline=common.offline,
        drain_s=drain_timeout,
    )
    raise typer.Exit(host.run())


def _require_model_name(argument: str) -> None:
    """Raise UsageError if an argument cannot be a model, such as a mistyped command. The check does not use the network."""
    from coldstart.models import resolver
    from coldstart.models.aliases import NAMES

    if resolver.can_be_model(argument):
        return
    commands = list(typer.main.get_group(app).commands)
    near = difflib.get_close_matches(argument.lower(), (*commands, *NAMES), n=1, cutoff=0.75)
    if Path(argument).is_file():
        hint = f"run `coldstart host --host-file {shlex.quote(argument)}`"
    elif near and near[0] in commands:
        hint = f"see `coldstart host {near[0]} --help`"
    else:
        hint = f"run `coldstart host {near[0] if near else NAMES[0]} --memory 60GiB`, or see `coldstart host --help`"
    raise UsageError(
        f"{argument!r} is neither a command of coldstart host ({', '.join(commands)}) nor a model: expected an alias, "
        "an existing directory, or OWNER/NAME on the Hugging Face Hub",
        hint=hint,
    )


_host_live.register_commands(app)
