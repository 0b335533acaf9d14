"""What is the same in every pod that the fleet's Kubernetes manifests describe: container, cache, bundles, shared memory.

Bundles come in one of two ways. As an image volume: an ordinary image that holds nothing but an image layout (the archive that
`coldstart export` writes, added to an empty image); the kubelet mounts it, read-only, where the store is. By an init container:
`coldstart pull` of each address into a volume that is empty at first. (An artifact as `coldstart push` makes it is not mounted
by every container runtime.) Either way what is unpacked or compiled goes to a writable volume.

Pure: documents in, documents out. Custom kinds are in `kuberay` and `leaderworkerset`.
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
    """One pod of a fleet. `image` has coldstart and vLLM (and ray, for KubeRay); `bundle_image` is mounted, `bundles` are
    pulled, `secret` has the clients' key as its member `api-key`; `hub_claim` is a volume claim with models of the hub.
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
                f"{self.name!r} is no name for Kubernetes",
                hint="small letters, digits and hyphens, a letter first",
            )
        for quantity in (self.memory, self.cpu, self.shm):
            if _QUANTITY.fullmatch(quantity) is None:
                raise UsageError(f"{quantity!r} is no quantity of Kubernetes", hint="write such as 64Gi")
        if self.bundle_image and self.bundles:
            raise UsageError(
                "the bundles come from an image volume or are pulled, not both", hint="leave one away"
            )
        if self.gpus < 0:
            raise UsageError(f"{self.gpus} GPUs")


def pod(options: PodOptions, container: Document) -> Document:
    """A pod template whose one container is `container` (name, command, args, ports, probes) with everything else it needs."""
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
    """Variables of a container, the secret's by reference."""
    given = {
        str(environment.CACHE_DIR): CACHE,
        "HF_HOME": HUB,
        "XDG_STATE_HOME": STATE,
        **options.environment,
    }
    return [{"name": name, "value": value} for name, value in given.items()]


def key(options: PodOptions, variable: str, member: str = "api-key") -> list[Document]:
    """The variable with that member of the secret, where there is a secret."""
    if options.secret is None:
        return []
    where = {"secretKeyRef": {"name": options.secret, "key": member}}
    return [{"name": variable, "valueFrom": where}]


def service(name: str, selector: dict[str, str]) -> Document:
    """The endpoint of the pods with those labels."""
    ports = [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"type": "ClusterIP", "selector": selector, "ports": ports},
    }


def probes(start_s: int) -> Document:
    """Of a server that answers /health; it has `start_s` seconds to come up."""
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
        # What is unpacked of a read-only or shared cache goes below a private directory here.
        {"name": "private", "emptyDir": {}},
        {"name": "hub", **hub},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    if options.bundle_image:
        source = {"reference": options.bundle_image, "pullPolicy": "IfNotPresent"}
        volumes.append({"name": "bundles", "image": source})
    return volumes


def _pulling(options: PodOptions) -> Document:
    """Each address after the other; the first that cannot be pulled keeps the pod from starting, and says why."""
    script = 'set -eu; for address; do coldstart pull "$address"; done'
    return {
        "name": "bundles",
        "image": options.image,
        "command": ["/bin/sh", "-c", script, "pull", *options.bundles],
        "env": variables(options),
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}],
    }


def text(documents: list[Document]) -> str:
    """YAML of several documents. Raises UsageError without PyYAML."""
    try:
        import yaml
    except ImportError as missing:
        raise UsageError("manifests are written by PyYAML", hint="coldstart install fleet") from missing
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=120))
