"""Serve models on many servers: plan, simulate, run on Ray, or describe it to Kubernetes."""

from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.commands._fleet_live import register
from coldstart.commands._fleet_manifest import Asked, Operator, documents
from coldstart.commands._options import Common, Gaps, Seed, group
from coldstart.commands._options import command as declare

app = group(__doc__)
_FILE = typer.Argument(metavar="FILE", help="The fleet's TOML file: servers and models.")


@app.command(help="Show where each model would start on the empty fleet, and what was weighed.")
@declare()
def plan(
    common: Common,
    file: Annotated[Path, _FILE],
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Only this model; repeatable.")
    ] = None,
    required: Annotated[
        int, typer.Option("--required", min=1, metavar="N", help="Workers that the load asks for.")
    ] = 1,
) -> None:
    """Predict, and show."""
    from coldstart.fleet import configuration
    from coldstart.fleet import plan as plans

    found = plans.planned(configuration.load(file), tuple(model or ()), required)
    common.out.result({"kind": "predicted", "models": found}, lambda: plans.text(found))


@app.command(help="Simulate made-up requests on the fleet; trace-replay --fleet takes real ones.")
@declare()
def simulate(
    common: Common,
    file: Annotated[Path, _FILE],
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 1.0,
    cv: Gaps = 1.0,
    duration: Annotated[float, typer.Option("--duration", help="Seconds of arrivals.")] = 3600.0,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Output tokens of each.")] = 128,
    seed: Seed = 0,
) -> None:
    """Simulate, and show."""
    from coldstart.fleet import configuration
    from coldstart.lab.fleet import replay

    known = configuration.load(file)
    with common.out.phase("simulate the fleet"):
        found = replay.run(known, replay.generated(known, rate, cv, duration, tokens, seed))
    common.out.result(found, lambda: replay.text(found))


def _word(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar)


@app.command(help="Describe a fleet to Kubernetes: YAML for KubeRay, or of one model for LeaderWorkerSet.")
@declare(takes_vllm_args=True)
def manifest(
    common: Common,
    operator: Annotated[Operator, _word("--for", help="Which operator is to run it.")],
    image: Annotated[
        str, _word("--image", metavar="IMAGE", help="Container with coldstart, vLLM and, for KubeRay, ray.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Of lws: what each group serves.")
    ] = None,
    name: Annotated[str, _word("--name", metavar="NAME", help="Of the objects.")] = "coldstart",
    memory: Annotated[str, _word("--memory", metavar="QUANTITY", help="Of each pod.")] = "64Gi",
    cpu: Annotated[str, _word("--cpu", metavar="QUANTITY", help="Of each pod.")] = "8",
    gpus: Annotated[int, _word("--gpus", metavar="N", help="Of each pod.")] = 0,
    shm: Annotated[str, _word("--shm", metavar="QUANTITY", help="Shared memory of each pod.")] = "16Gi",
    bundle_image: Annotated[
        str | None,
        _word("--bundle-image", metavar="IMAGE", help="Mount this image of bundles as a volume."),
    ] = None,
    bundle: Annotated[
        list[str] | None,
        _word("--bundle", metavar="ADDRESS", help="Pull this bundle before the start; repeatable."),
    ] = None,
    secret: Annotated[
        str | None,
        _word("--secret", metavar="NAME", help="Secret with api-key for clients, and admin-key for a fleet."),
    ] = None,
    hub_claim: Annotated[
        str | None, _word("--hub-claim", metavar="NAME", help="Volume claim with the hub's cache.")
    ] = None,
    ranks: Annotated[int, _word("--ranks", metavar="N", help="Of lws: pods of a pipeline.")] = 1,
    replicas: Annotated[int, _word("--replicas", metavar="N", help="Of lws: groups.")] = 1,
    servers: Annotated[int, _word("--servers", metavar="N", help="Of kuberay: servers.")] = 1,
    most: Annotated[
        int | None,
        _word("--most", metavar="N", help="Of kuberay: servers there may come to be; default: --servers."),
    ] = None,
    devices: Annotated[
        int | None, _word("--devices", metavar="N", help="Of kuberay: devices of a server; default: --gpus.")
    ] = None,
    device_memory: Annotated[
        str | None, _word("--device-memory", metavar="SIZE", help="Of kuberay: for models, on each device.")
    ] = None,
    network: Annotated[
        str | None,
        _word("--network", metavar="SIZE", help="Of kuberay: bytes/s of a server's link; default: 1GB."),
    ] = None,
    load: Annotated[
        str | None, _word("--load", metavar="SIZE", help="Of kuberay: bytes/s to a device; default: 10GB.")
    ] = None,
    state_claim: Annotated[
        str | None,
        _word("--state-claim", metavar="NAME", help="Of kuberay: volume claim of the fleet's state."),
    ] = None,
) -> None:
    """Check, and write; nothing is asked of a cluster."""
    from coldstart.fleet.manifests.manifest import PodOptions, text

    pods = PodOptions(
        name, image, memory, cpu, gpus, shm, bundle_image, tuple(bundle or ()), secret, hub_claim
    )
    asked = Asked(
        model,
        common.vllm_args,
        ranks,
        replicas,
        servers,
        most,
        devices,
        device_memory,
        network,
        load,
        state_claim,
    )
    found = documents(operator, pods, asked)
    common.out.result({"documents": found}, lambda: text(found))


register(app)
