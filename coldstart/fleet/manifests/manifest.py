"""Parts that all pods of the fleet's Kubernetes manifests share: container, cache, bundles, shared memory.

Bundles are provided in one of two ways. An image volume mounts an ordinary image that contains only an image layout
(the archive that `coldstart export` writes, added to an empty image) read-only at the bundle store. An init container
runs `coldstart pull` for each address into a volume that is empty at first. (Not every container runtime can mount an
artifact that `coldstart push` created.) Unpacked or compiled files go to a writable volume in both cases.

This module does no I/O. Custom resources are in `kuberay` and `leaderworkerset`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from coldstart.contract import environment
from coldstart.errors import UsageError

Document = dict[str, Any]
CACHE, BUNDLES, PRIVATE, HUB, STATE = (
    "/var/cache/coldstart",
    "/var/cache/coldstart/bundles",
    "/var/tmp",
    "/var/cache/huggingface",
    "/var/lib/coldstart",
)
PORT = 8000
GPU = "nvidia.com/gpu"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


@dataclass(frozen=True, slots=True)
class PodOptions:
    """One pod of a fleet.

    `image` contains coldstart and vLLM (and ray, for KubeRay). `bundle_image` is mounted; `bundles` are pulled.
    `secret` names a secret with the clients' key as its member `api-key`. `hub_claim` is a volume claim with models
    of the hub.
    """

    name: str
    image: str
    memory: str
    cpu: str = "8"
    gpus: int = 0
    shm: str = "16Gi"
    bundle_image: str | None = None
    bundles: tuple[str, ...] = ()
    secret: str | None = None
    hub_claim: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise UsageError(
                f"invalid Kubernetes name {self.name!r}",
                hint="use lower-case letters, digits and hyphens, with a letter first",
            )
        for quantity in (self.memory, self.cpu, self.shm):
            if _QUANTITY.fullmatch(quantity) is None:
                raise UsageError(
                    f"invalid Kubernetes quantity {quantity!r}", hint="write a quantity such as 64Gi"
                )
        if self.bundle_image and self.bundles:
            raise UsageError(
                "bundles come from an image volume or are pulled, not both", hint="set only one of the two"
            )
        if self.gpus < 0:
            raise UsageError(f"invalid number of GPUs: expected 0 or more, found {self.gpus}")


def pod(options: PodOptions, container: Document) -> Document:
    """Return a pod template with one container: `container` (name, command, args, ports, probes) and the shared parts."""
    mounts: list[Document] = [
        {"name": "cache", "mountPath": CACHE},
        {"name": "private", "mountPath": PRIVATE},
        {"name": "hub", "mountPath": HUB},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if options.bundle_image:
        mounts.append({"name": "bundles", "mountPath": BUNDLES, "readOnly": True})
    more = container.pop("volumeMounts", [])
    whole = {
        **container,
        "image": options.image,
        "env": [*variables(options), *container.pop("env", [])],
        "resources": _resources(options),
        "volumeMounts": [*mounts, *more],
    }
    spec: Document = {
        "containers": [whole],
        "volumes": _volumes(options),
        "terminationGracePeriodSeconds": 90,
    }
    if options.bundles:
        spec["initContainers"] = [_pulling(options)]
    return {"metadata": {"labels": {"app.kubernetes.io/name": options.name}}, "spec": spec}


def variables(options: PodOptions) -> list[Document]:
    """Return the environment variables of a container, without secrets."""
    given = {
        str(environment.CACHE_DIR): CACHE,
        "HF_HOME": HUB,
        "XDG_STATE_HOME": STATE,
        **options.environment,
    }
    return [{"name": name, "value": value} for name, value in given.items()]


def key(options: PodOptions, variable: str, member: str = "api-key") -> list[Document]:
    """Return the variable that reads a member of the secret; empty without a secret."""
    if options.secret is None:
        return []
    where = {"secretKeyRef": {"name": options.secret, "key": member}}
    return [{"name": variable, "valueFrom": where}]


def service(name: str, selector: dict[str, str]) -> Document:
    """Return the service for the pods with these labels."""
    ports = [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"type": "ClusterIP", "selector": selector, "ports": ports},
    }


def probes(start_s: int) -> Document:
    """Return the probes of a server that answers /health and has `start_s` seconds to start."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    return {
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": max(1, start_s // 2)},
        "readinessProbe": {**health, "periodSeconds": 5},
    }


def _resources(options: PodOptions) -> Document:
    limits = {"cpu": options.cpu, "memory": options.memory}
    if options.gpus:
        limits[GPU] = str(options.gpus)
    return {"limits": limits, "requests": dict(limits)}


def _volumes(options: PodOptions) -> list[Document]:
    hub: Document = {"emptyDir": {}}
    if options.hub_claim:
        hub = {"persistentVolumeClaim": {"claimName": options.hub_claim, "readOnly": True}}
    volumes: list[Document] = [
        {"name": "cache", "emptyDir": {}},
        # Sections of a read-only or shared cache are unpacked below a private directory here.
        {"name": "private", "emptyDir": {}},
        {"name": "hub", **hub},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    if options.bundle_image:
        source = {"reference": options.bundle_image, "pullPolicy": "IfNotPresent"}
        volumes.append({"name": "bundles", "image": source})
    return volumes


def _pulling(options: PodOptions) -> Document:
    """Return the init container that pulls all bundles; the first failure prevents the pod's start and is logged."""
    script = 'set -eu; for address; do coldstart pull "$address"; done'
    return {
        "name": "bundles",
        "image": options.image,
        "command": ["/bin/sh", "-c", script, "pull", *options.bundles],
        "env": variables(options),
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}],
    }


def text(documents: list[Document]) -> str:
    """Return the documents as YAML. Raises UsageError without PyYAML."""
    try:
        import yaml
    except ImportError as missing:
        raise UsageError(
            "cannot write manifests: PyYAML is not installed", hint="coldstart install fleet"
        ) from missing
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=120))
