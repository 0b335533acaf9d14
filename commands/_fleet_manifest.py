"""Documents of `coldstart fleet manifest` for an operator of Kubernetes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coldstart.errors import UsageError


class Operator(StrEnum):
    """Kubernetes operator that reads the manifest."""

    KUBERAY = "kuberay"
    LWS = "lws"


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of the command that apply to one operator only."""

    model: str | None
    args: Sequence[str]
    ranks: int
    replicas: int
    servers: int
    most: int | None
    devices: int | None
    device_memory: str | None
    network: str | None
    load: str | None
    state_claim: str | None


def documents(operator: Operator, pods: Any, asked: Asked) -> list[dict[str, Any]]:
    """Return the operator's documents. Raises UsageError if an option is missing."""
    return _lws(pods, asked) if operator is Operator.LWS else _kuberay(pods, asked)


def _lws(pods: Any, asked: Asked) -> list[dict[str, Any]]:
    from coldstart.fleet.manifests import leaderworkerset

    if asked.model is None:
        raise UsageError(
            "--for lws needs a model.", hint="coldstart fleet manifest MODEL --for lws --image IMAGE"
        )
    group = leaderworkerset.GroupOptions(asked.model, tuple(asked.args), asked.ranks, asked.replicas)
    return leaderworkerset.documents(pods, group)


def _kuberay(pods: Any, asked: Asked) -> list[dict[str, Any]]:
    from coldstart.fleet.manifests import kuberay
    from coldstart.fleet.specification import ServerSpec
    from coldstart.units import parse_size

    if asked.model is not None or asked.args:
        raise UsageError(
            "--for kuberay takes no model and no vLLM arguments.",
            hint="remove them, and deploy the model when the fleet runs",
        )
    if asked.device_memory is None:
        raise UsageError(
            "--device-memory is missing: the memory for models on each device of a server.",
            hint="--device-memory 24GB",
        )
    server = ServerSpec(
        "server",
        parse_size(asked.device_memory),
        float(parse_size(asked.network or "1GB")),
        float(parse_size(asked.load or "10GB")),
        asked.devices or max(1, pods.gpus),
    )
    fleet = kuberay.FleetOptions(server, asked.servers, asked.most, state_claim=asked.state_claim)
    return kuberay.documents(pods, fleet)
