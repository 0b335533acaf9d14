"""`coldstart fleet up` and what is asked of the fleet that runs. Nothing here imports Ray: the gateway is asked over HTTP."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._options import Common, Model, OnMissing
from coldstart.commands._options import command as declare

from coldstart.errors import CommandFailedError, UsageError
from coldstart.host.endpoint import GatewayEndpoint

if TYPE_CHECKING:
    from coldstart.fleet.live.local_state import LocalFleet
    from coldstart.fleet.specification import ServerSpec

HEADER = "x-coldstart-admin-key"


def _word(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar)


_URL = _word("--url", metavar="URL", help="The gateway; else this user's fleet on this machine.")
_KEY = _word("--admin-key", metavar="KEY", help="The fleet's admin key.")
Url = Annotated[str | None, _URL]
Key = Annotated[str | None, _KEY]
Memory = Annotated[
    str | None, _word("--memory", metavar="SIZE", help="For models on each device of this machine.")
]
Devices = Annotated[int, _word("--devices", metavar="N", help="Devices of this machine.")]
Network = Annotated[str, _word("--network", metavar="SIZE", help="Bytes/s of this machine's link.")]
Load = Annotated[str, _word("--load", metavar="SIZE", help="Bytes/s from its memory to a device.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for function, text in COMMANDS.items():
        declared = declare(takes_vllm_args=function is deploy, listens=function is up)
        app.command(help=text)(declared(function))


def up(
    common: Common,
    endpoint: GatewayEndpoint,
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
    address: Annotated[
        str | None,
        _word("--address", metavar="HOST:PORT", help="Use this Ray cluster; else one is started here."),
    ] = None,
    state: Annotated[
        Path | None, _word("--state", metavar="FILE", help="What is deployed, kept over restarts.")
    ] = None,
    admin_key: Key = None,
    max_held: Annotated[
        int, _word("--max-held", metavar="N", help="Requests that may wait for models; then 429.")
    ] = 1024,
    ranks: Annotated[
        int, _word("--ranks", metavar="N", help="Servers that may start one model as a pipeline, at most.")
    ] = 1,
    consolidate: Annotated[
        bool,
        _word(
            "--consolidate/--no-consolidate",
            help="Load the whole model beside a rank of a pipeline, and hand its streams over.",
        ),
    ] = True,
    record: Annotated[
        Path | None, _word("--record", metavar="FILE", help="Write every event and decision, one a line.")
    ] = None,
) -> None:
    """Listen, and stay."""
    from coldstart.fleet.live import ray_node
    from coldstart.fleet.specification import FleetSettings

    ray_node.require()
    if address is not None and memory is not None:
        raise UsageError(
            "A cluster's nodes say themselves what they can.",
            hint="coldstart fleet join ADDRESS --memory 60GiB",
        )
    server = None if memory is None else _server(memory, devices, network, load)

    from coldstart.fleet.live.run import FleetUp, FleetUpOptions
    from coldstart.host.live.log import Log

    options = FleetUpOptions(
        common.cache,
        FleetSettings(most_ranks=ranks, consolidate=consolidate, max_held=max_held),
        state.absolute() if state else None,
        server,
        address,
        endpoint,
        admin_key,
        offline=common.offline,
        record=record.absolute() if record else None,
    )

    def announce(place: "LocalFleet") -> None:
        said = {"url": place.url, "ray": place.ray}
        common.out.result(said, f"{place.url}  a fleet's gateway, on the Ray at {place.ray}")

    raise typer.Exit(FleetUp(options, Log(quiet=common.out.quiet), announce).run())


def join(
    common: Common,
    address: Annotated[
        str | None, typer.Argument(metavar="[HOST:PORT]", help="The fleet's Ray; else this user's.")
    ] = None,
    memory: Memory = None,
    devices: Devices = 1,
    network: Network = "1GB",
    load: Load = "10GB",
) -> None:
    """Become a node of Ray with the labels of a server, and again where Ray gave the node up."""
    from coldstart.contract import environment
    from coldstart.fleet.live import local_state, ray_node
    from coldstart.fleet.live.ray_process import JoinedNode
    from coldstart.host.live.log import Log

    ray_node.require()
    if memory is None:
        raise UsageError("How much may models take on each device here?", hint="--memory 60GiB")
    server = _server(memory, devices, network, load)
    known = local_state.load() if address else local_state.require()
    env = {str(environment.CACHE_DIR): str(common.cache.root)}
    if known is not None and known.token and known.ray == (address or known.ray):
        env["RAY_AUTH_TOKEN"] = known.token
    command = ray_node.joining(server, address or local_state.require().ray)
    raise typer.Exit(JoinedNode(command, env, Log(quiet=common.out.quiet)).run())


def _server(memory: str, devices: int, network: str, load: str) -> "ServerSpec":
    from coldstart.fleet.specification import ServerSpec
    from coldstart.units import parse_size

    return ServerSpec(
        "here", parse_size(memory), float(parse_size(network)), float(parse_size(load)), devices
    )


def deploy(
    common: Common,
    model: Model,
    least: Annotated[int, _word("--min", metavar="N", help="Workers that are always there.")] = 0,
    most: Annotated[int, _word("--max", metavar="N", help="Workers at most.")] = 1,
    slo: Annotated[
        str | None, _word("--slo", metavar="ttft=S,tpot=S", help="Limits in seconds by which it is placed.")
    ] = None,
    idle: Annotated[
        float, _word("--idle", metavar="SECONDS", help="A worker that nobody asked for so long goes.")
    ] = 600.0,
    name: Annotated[str | None, _word("--name", metavar="NAME", help="What it is asked for by.")] = None,
    batch: Annotated[int, _word("--batch", metavar="N", help="Requests at once in a worker.")] = 64,
    memory: Annotated[
        str | None, _word("--memory", metavar="SIZE", help="On the device; else as its bundle says.")
    ] = None,
    size: Annotated[
        str | None, _word("--size", metavar="SIZE", help="Of its weights; else as its files say.")
    ] = None,
    start: Annotated[
        float | None, _word("--start", metavar="SECONDS", help="Until it serves; else as its bundle says.")
    ] = None,
    weights_from: Annotated[
        str | None,
        _word(
            "--weights-from",
            metavar="SOURCE",
            help="Where servers without its weights fetch them: http(s)://..., s3://... or hf://REPO@REV.",
        ),
    ] = None,
    on_miss: OnMissing = "fail",
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Look up what it takes, and tell the fleet."""
    from coldstart.fleet.live import deployments, wire
    from coldstart.host.launches import Launch

    launch = Launch(name or model, model, common.vllm_args, on_miss=on_miss, weights_from=weights_from)
    wanted = deployments.DeployArguments(
        least, most, deployments.limits(slo), idle, batch, memory, size, start
    )
    made = deployments.build_deployment(launch, wanted, common.cache, offline=common.offline)
    _ordered(common, url, admin_key, "deploy", wire.document(made))
    common.out.success(f"Deployed {made.spec.name}", then="coldstart fleet status")


def scale(
    common: Common,
    model: str,
    least: Annotated[int, _word("--min", metavar="N", help="Workers that are always there.")],
    most: Annotated[int, _word("--max", metavar="N", help="Workers at most.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """Change how many there may be."""
    _ordered(common, url, admin_key, "scale", model, least, most)


def remove(common: Common, model: str, url: Url = None, admin_key: Key = None) -> None:
    """What it answers is answered first."""
    _ordered(common, url, admin_key, "remove", model)


def drain(
    common: Common,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="As `fleet status` calls it.")],
    url: Url = None,
    admin_key: Key = None,
) -> None:
    """What it answers is answered first."""
    _ordered(common, url, admin_key, "drain", server)


def status(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """One document."""
    from coldstart.commands._fleet_table import render

    found = _ask(common, url, admin_key, "/fleet/status")
    common.out.result(found, lambda: render(found))


def down(common: Common, url: Url = None, admin_key: Key = None) -> None:
    """The servers, the controller and the gateway that is asked."""
    _ask(common, url, admin_key, "/fleet/down", {})
    common.out.success("Ended the fleet")


def _ordered(common: Common, url: str | None, key: str | None, method: str, *args: Any) -> None:
    found = _ask(common, url, key, "/fleet/order", {"method": method, "args": list(args)})
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
        reason = str(error) if isinstance(error, RemoteUnreachableError) else "its answer is not JSON"
        raise CommandFailedError(
            f"No fleet answers at {url}: {reason}.", hint="coldstart fleet up --memory 60GiB"
        ) from error
    if reply.status == 401:
        raise CommandFailedError(f"{url} asks for another key.", hint="--admin-key-file FILE")
    if not isinstance(found, dict):
        raise CommandFailedError(
            f"{url} answers, but it is no fleet (status {reply.status}).", hint="--url URL"
        )
    if reply.status != 200:
        raise CommandFailedError(f"The fleet refuses: {found.get('error', found)}", hint=found.get("hint"))
    return found


def _locate(url: str | None, key: str | None) -> tuple[str, str]:
    """Return the address and the admin key, from this user's fleet where they are not given."""
    from coldstart.fleet.live import local_state

    if url is not None and key is not None:
        return url, key
    known = local_state.require() if url is None else local_state.load()
    if known is None or (url is not None and url != known.url):
        assert url is not None
        return url, key or ""
    return known.url, key or known.admin_key


COMMANDS: dict[Callable[..., None], str] = {
    up: "Run a fleet's gateway, on a Ray started here or one that is named.",
    join: "Make this machine a server of a fleet.",
    deploy: "Have a model served by the fleet; what follows -- is vLLM's.",
    status: "Show servers, models and who serves what.",
    scale: "Change how many workers a model has.",
    drain: "Have a server take nothing new, and let it go empty.",
    remove: "Serve a model no more.",
    down: "End a fleet: servers, controller, gateway.",
}
