"""Commands that run a fleet, or call a running fleet over HTTP. Nothing here imports Ray."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._options import Common, Model, OnMissing, option
from coldstart.commands._options import command as declare

from coldstart.errors import CommandFailedError, UsageError
from coldstart.fleet.specification import FleetSettings
from coldstart.host.endpoint import GatewayEndpoint

if TYPE_CHECKING:
    from coldstart.fleet.live.local_state import LocalFleet
    from coldstart.fleet.specification import ServerSpec

HEADER = "x-coldstart-admin-key"


_URL = option("--url", metavar="URL", help="URL of the gateway; default: this user's fleet on this machine.")
_KEY = option(
    "--admin-key", metavar="KEY", help="Admin key of the fleet; default: the saved key of this user's fleet."
)
Url = Annotated[str | None, _URL]
Key = Annotated[str | None, _KEY]
NewKey = Annotated[
    str | None,
    option("--admin-key", metavar="KEY", help="Admin key of the fleet; default: a new random key."),
]
Memory = Annotated[
    str | None,
    option("--memory", metavar="SIZE", help="Memory for models on each GPU of this machine, such as 60GiB."),
]
Devices = Annotated[int, option("--devices", metavar="N", help="Number of GPUs of this machine.")]
Network = Annotated[
    str, option("--network", metavar="SIZE", help="Network bandwidth of this machine in bytes per second.")
]
Load = Annotated[
    str, option("--load", metavar="SIZE", help="Bandwidth from CPU memory to a GPU, in bytes per second.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for function, text in COMMANDS.items():
        sets = FleetSettings(max_held=1024) if function is up else None
        declared = declare(takes_vllm_args=function is deploy, listens=function is up, sets=sets)
        app.command(help=text)(declared(function))


def up(
    common: Common,
    endpoint: GatewayEndpoint,
    settings: dict[str, Any],
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
    address: Annotated[
        str | None,
        option(
            "--address",
            metavar="HOST:PORT",
            help="Address of an existing Ray cluster; default: start one here.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        option(
            "--state", metavar="FILE", help="File that retains the deployments over restarts; default: none."
        ),
    ] = None,
    admin_key: NewKey = None,
) -> None:
    """Run the gateway until it is stopped."""
    from coldstart.fleet.live import ray_process

    ray_process.require()
    if address is not None and memory is not None:
        raise UsageError(
            "--memory applies to a Ray cluster that this command starts, not to the one at --address",
            hint="coldstart fleet join ADDRESS --memory 60GiB",
        )
    server = None if memory is None else _server(memory, devices, network, load)

    from coldstart.fleet.live.run import FleetUp
    from coldstart.host.live.log import Log

    def announce(place: "LocalFleet") -> None:
        said = {"url": place.url, "ray": place.ray}
        common.out.result(said, f"{place.url}  gateway of a fleet, Ray at {place.ray}")

    fleet = FleetUp(
        common.cache,
        FleetSettings(**settings),
        Log(quiet=common.out.quiet),
        announce,
        state=state.absolute() if state else None,
        server=server,
        address=address,
        endpoint=endpoint,
        admin_key=admin_key,
        offline=common.offline,
    )
    raise typer.Exit(fleet.run())


def join(
    common: Common,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]", help="Address of the fleet's Ray cluster; default: this user's fleet."
        ),
    ] = None,
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
) -> None:
    """Run a Ray node with the labels of a server, and restart it if Ray stops it."""
    from coldstart.contract import environment
    from coldstart.fleet.live import local_state, ray_process
    from coldstart.host.live.log import Log

    ray_process.require()
    if memory is None:
        raise UsageError("--memory is missing: the memory for models on each device", hint="--memory 60GiB")
    server = _server(memory, devices, network, load)
    known = local_state.load() if address else local_state.require()
    env = {str(environment.CACHE_DIR): str(common.cache.root)}
    if known is not None and known.token and known.ray == (address or known.ray):
        env["RAY_AUTH_TOKEN"] = known.token
    command = ray_process.joining(server, address or local_state.require().ray)
    ray_process.run_joined(command, env, Log(quiet=common.out.quiet))


def _server(memory: str, devices: int, network: str, load: str) -> "ServerSpec":
    from coldstart.fleet.specification import ServerSpec
    from coldstart.units import parse_size, require_unit

    size = parse_size(memory)
    require_unit(memory, "--memory", hint=f"--memory {memory.strip()}MiB")
    return ServerSpec("here", size, float(parse_size(network)), float(parse_size(load)), devices)


def deploy(
    common: Common,
    model: Model,
    least: Annotated[int, option("--min", metavar="N", help="Minimum number of workers.")] = 0,
    most: Annotated[int, option("--max", metavar="N", help="Maximum number of workers.")] = 1,
    slo: Annotated[
        str | None,
        option(
            "--slo",
            metavar="METRIC=S",
            help="Limits in seconds that the placement must meet, such as ttft=2,tpot=0.1.",
        ),
    ] = None,
    idle: Annotated[
        float, option("--idle", metavar="SECONDS", help="Time without a request after which a worker stops.")
    ] = 600.0,
    name: Annotated[
        str | None, option("--name", metavar="NAME", help="Model name in requests; default: MODEL.")
    ] = None,
    batch: Annotated[
        int, option("--batch", metavar="N", help="Maximum number of concurrent requests of a worker.")
    ] = 64,
    memory: Annotated[
        str | None,
        option(
            "--memory",
            metavar="SIZE",
            help="Device memory of a worker; default: from its bundle.",
        ),
    ] = None,
    size: Annotated[
        str | None, option("--size", metavar="SIZE", help="Size of the weights; default: from the files.")
    ] = None,
    start: Annotated[
        float | None,
        option(
            "--start",
            metavar="SECONDS",
            help="Duration of a start without loading the weights, in seconds; default: as its bundle records.",
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        option(
            "--weights-from",
            metavar="SOURCE",
            help="Source for servers without the weights: http(s)://..., s3://... or hf://REPO@REV.",
        ),
    ] = None,
    on_miss: OnMissing = "fail",
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Look up the model's memory and start time, and send the deployment to the fleet."""
    from coldstart.fleet.live import deployments, state
    from coldstart.host.launches import Launch

    launch = Launch(name or model, model, common.vllm_args, on_miss=on_miss, weights_from=weights_from)
    made = deployments.build_deployment(
        launch,
        common.cache,
        offline=common.offline,
        workers=(least, most),
        slo=deployments.parse_limits(slo),
        idle_s=idle,
        batch=batch,
        memory=memory,
        size=size,
        start_s=start,
    )
    _ordered(common, url, admin_key, "deploy", deployment=state.encode(made))
    common.out.success(f"Deployed {made.spec.name}", then="coldstart fleet status")


def scale(
    common: Common,
    model: str,
    least: Annotated[int, option("--min", metavar="N", help="Minimum number of workers.")],
    most: Annotated[int, option("--max", metavar="N", help="Maximum number of workers.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Change the minimum and maximum number of workers."""
    _ordered(common, url, admin_key, "scale", model=model, least=least, most=most)


def remove(common: Common, model: str, url: Url = None, admin_key: Key = None) -> None:
    """Remove a model after its running requests."""
    _ordered(common, url, admin_key, "remove", model=model)


def drain(
    common: Common,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="Name of the server in `fleet status`.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Drain a server; its running requests finish first."""
    _ordered(common, url, admin_key, "drain", server=server)


def status(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """Print the status once."""
    from coldstart.commands._fleet_table import render

    found = _ask(common, url, admin_key, "/fleet/status")
    common.out.result(found, lambda: render(found))


def down(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """End the servers and the gateway."""
    _ask(common, url, admin_key, "/fleet/down", {})
    common.out.success("Ended the fleet")


def _ordered(common: Common, url: str | None, key: str | None, method: str, **members: Any) -> None:
    found = _ask(common, url, key, "/fleet/order", {"method": method, **members})
    if common.out.format == "json":
        common.out.result(found, "")


def _ask(common: Common, url: str | None, key: str | None, path: str, order: object = None) -> dict[str, Any]:
    """Return the fleet's answer to a GET, or to a POST of `order`.

    Raises:
        CommandFailedError: no fleet answers, or the fleet refuses.
    """
    from coldstart.artifacts.net.http_client import RemoteUnreachableError
    from coldstart.commands._client import ServerClient

    url, key = _locate(url, key)
    server = ServerClient(url, {HEADER: key} if key else {}, common.out, wait_s=60)
    try:
        reply = server.get(path) if order is None else server.post(path, json.dumps(order).encode())
        found = json.loads(reply.body)
    except (RemoteUnreachableError, ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, RemoteUnreachableError) else "the response is not JSON"
        raise CommandFailedError(
            f"no fleet responds at {url}: {reason}", hint="coldstart fleet up --memory 60GiB"
        ) from error
    if reply.status == 401:
        raise CommandFailedError(f"{url} rejects the admin key", hint="--admin-key-file FILE")
    if not isinstance(found, dict):
        raise CommandFailedError(f"{url} is not a fleet (HTTP status {reply.status})", hint="--url URL")
    if reply.status != 200:
        raise CommandFailedError(
            f"the fleet rejects the request: {found.get('error', found)}", hint=found.get("hint")
        )
    return found


def _locate(url: str | None, key: str | None) -> tuple[str, str]:
    """Return the address and the admin key, from this user's fleet if they are not given."""
    from coldstart.fleet.live import local_state

    if url is not None and key is not None:
        return url, key
    known = local_state.require() if url is None else local_state.load()
    if known is None or (url is not None and url != known.url):
        assert url is not None
        return url, key or ""
    return known.url, key or known.admin_key


COMMANDS: dict[Callable[..., None], str] = {
    up: "Run the gateway of a fleet. Uses a new or an existing Ray cluster.",
    join: "Make this machine a server of a fleet.",
    deploy: "Deploy a model to the fleet. Arguments after -- go to vLLM.",
    status: "Show servers, models and workers.",
    scale: "Change the number of workers of a model.",
    drain: "Start nothing more on a server. Its workers finish and stop.",
    remove: "Remove a model after its running requests.",
    down: "End a fleet. Stops the servers and the gateway.",
}
