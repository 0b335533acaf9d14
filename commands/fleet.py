"""Serve models on many servers: plan, simulate, run on Ray, or write Kubernetes manifests."""

from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.commands._fleet_live import register
from coldstart.commands._fleet_manifest import Asked, Operator, documents
from coldstart.commands._options import Common, Gaps, Seed, group
from coldstart.commands._options import command as declare
from coldstart.commands._tables import Verbatim

app = group(__doc__)
_FILE = typer.Argument(metavar="FILE", help="TOML file of the fleet: servers and models.")


@app.command(help="Show where each model would start. Assumes an empty fleet, and lists the alternatives.")
@declare()
def plan(
    common: Common,
    file: Annotated[Path, _FILE],
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Plan only this model; repeatable.")
    ] = None,
    required: Annotated[
        int, typer.Option("--required", min=1, metavar="N", help="Number of workers that the load needs.")
    ] = 1,
) -> None:
    """Print the predicted placements."""
    from coldstart.fleet import configuration
    from coldstart.fleet import plan as plans

    found = plans.planned(configuration.load(file), tuple(model or ()), required)
    common.out.result({"kind": "predicted", "models": found}, lambda: plans.text(found))


@app.command(help="Simulate generated requests on the fleet. To read a trace, use trace-replay --fleet.")
@declare()
def simulate(
    common: Common,
    file: Annotated[Path, _FILE],
    rate: Annotated[float, typer.Option("--rate", help="Number of requests per second.")] = 1.0,
    cv: Gaps = 1.0,
    duration: Annotated[
        float, typer.Option("--duration", help="Duration of the arrivals in seconds.")
    ] = 3600.0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Number of output tokens per request.")
    ] = 128,
    seed: Seed = 0,
) -> None:
    """Print the result of the simulation."""
    from coldstart.fleet import configuration
    from coldstart.lab.fleet import replay

    known = configuration.load(file)
    with common.out.phase("simulate the fleet"):
        found = replay.run(known, replay.generated(known, rate, cv, duration, tokens, seed))
    common.out.result(found, lambda: replay.text(found))


def _word(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar)


@app.command(help="Write Kubernetes manifests. A fleet is for KubeRay, one model for LeaderWorkerSet.")
@declare(takes_vllm_args=True)
def manifest(
    common: Common,
    operator: Annotated[Operator, _word("--for", help="Kubernetes operator that reads the YAML.")],
    image: Annotated[
        str,
        _word("--image", metavar="IMAGE", help="Container image with coldstart, vLLM and, for KubeRay, ray."),
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model that each group serves (lws).")
    ] = None,
    name: Annotated[str, _word("--name", metavar="NAME", help="Name of the objects.")] = "coldstart",
    memory: Annotated[str, _word("--memory", metavar="QUANTITY", help="Memory of each pod.")] = "64Gi",
    cpu: Annotated[str, _word("--cpu", metavar="QUANTITY", help="CPUs of each pod.")] = "8",
    gpus: Annotated[int, _word("--gpus", metavar="N", help="Number of GPUs of each pod.")] = 0,
    shm: Annotated[str, _word("--shm", metavar="QUANTITY", help="Shared memory of each pod.")] = "16Gi",
    bundle_image: Annotated[
        str | None,
        _word("--bundle-image", metavar="IMAGE", help="Image of bundles to mount as a volume."),
    ] = None,
    bundle: Annotated[
        list[str] | None,
        _word("--bundle", metavar="ADDRESS", help="Bundle to pull before the start; repeatable."),
    ] = None,
    secret: Annotated[
        str | None,
        _word(
            "--secret", metavar="NAME", help="Secret with api-key for clients and admin-key for operators."
        ),
    ] = None,
    hub_claim: Annotated[
        str | None, _word("--hub-claim", metavar="NAME", help="Volume claim with the Hugging Face cache.")
    ] = None,
    ranks: Annotated[
        int,
        _word("--ranks", metavar="N", help="Number of pods in a group, one for each pipeline rank (lws)."),
    ] = 1,
    replicas: Annotated[int, _word("--replicas", metavar="N", help="Number of groups (lws).")] = 1,
    servers: Annotated[int, _word("--servers", metavar="N", help="Number of servers (kuberay).")] = 1,
    most: Annotated[
        int | None,
        _word("--most", metavar="N", help="Maximum number of servers (kuberay); default: --servers."),
    ] = None,
    devices: Annotated[
        int | None,
        _word("--devices", metavar="N", help="Number of devices of a server (kuberay); default: --gpus."),
    ] = None,
    device_memory: Annotated[
        str | None,
        _word("--device-memory", metavar="SIZE", help="Memory for models on each device (kuberay)."),
    ] = None,
    network: Annotated[
        str | None,
        _word(
            "--network",
            metavar="SIZE",
            help="Bandwidth of a server's link in bytes per second (kuberay); default: 1GB.",
        ),
    ] = None,
    load: Annotated[
        str | None,
        _word(
            "--load",
            metavar="SIZE",
            help="Bandwidth to a device in bytes per second (kuberay); default: 10GB.",
        ),
    ] = None,
    state_claim: Annotated[
        str | None,
        _word("--state-claim", metavar="NAME", help="Volume claim for the state of the fleet (kuberay)."),
    ] = None,
) -> None:
    """Check the options and write the YAML, without access to a cluster."""
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
    common.out.result({"documents": found}, lambda: Verbatim(text(found)))


register(app)
