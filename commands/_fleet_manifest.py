"""`coldstart fleet manifest`: what an operator of Kubernetes is to be given."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coldstart.errors import UsageError


class Operator(StrEnum):
    """For whom a manifest is."""

    KUBERAY = "kuberay"
    LWS = "lws"


@dataclass(frozen=True, slots=True)
class Asked:
    """The words of the command that only one of the operators understands."""

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
    """The operator's documents. Raises UsageError where something is missing."""
    return _lws(pods, asked) if operator is Operator.LWS else _kuberay(pods, asked)


def _lws(pods: Any, asked: Asked) -> list[dict[str, Any]]:
    from coldstart.fleet.manifests import leaderworkerset

    if asked.model is None:
        raise UsageError(
            "LeaderWorkerSet serves one model.", hint="coldstart fleet manifest MODEL --for lws --image IMAGE"
        )
    group = leaderworkerset.GroupOptions(asked.model, tuple(asked.args), asked.ranks, asked.replicas)
    return leaderworkerset.documents(pods, group)


def _kuberay(pods: Any, asked: Asked) -> list[dict[str, Any]]:
    from coldstart.fleet.manifests import kuberay
    from coldstart.fleet.specification import ServerSpec
    from coldstart.units import parse_size

    if asked.model is not None or asked.args:
        raise UsageError(
            "A Ray cluster's models are deployed to it.",
            hint="leave the model away, and deploy it once the fleet is up",
        )
    if asked.device_memory is None:
        raise UsageError("How much may models take on each device of a server?", hint="--device-memory 24GB")
    server = ServerSpec(
        "server",
        parse_size(asked.device_memory),
        float(parse_size(asked.network or "1GB")),
        float(parse_size(asked.load or "10GB")),
        asked.devices or max(1, pods.gpus),
    )
    fleet = kuberay.FleetOptions(server, asked.servers, asked.most, state_claim=asked.state_claim)
    return kuberay.documents(pods, fleet)
