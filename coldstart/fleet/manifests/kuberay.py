"""Manifest of a fleet on KubeRay: a RayCluster whose head runs gateway and controller and whose workers are the servers.

The labels of a worker describe its server (bytes of a device, bytes/s of its link and to its device); the controller
reads them. RayService is not used: it manages Ray Serve applications, and no token of this fleet passes through Ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coldstart.contract.environment import PREFIX
from coldstart.errors import UsageError
from coldstart.fleet.labels import labels
from coldstart.fleet.manifests import manifest
from coldstart.fleet.manifests.manifest import Document, PodOptions
from coldstart.fleet.specification import ServerSpec

OVERWRITE = "ray.io/overwrite-container-cmd"
"""Annotation with which the operator runs our command and passes its own in KUBERAY_GEN_RAY_START_CMD."""
_START = 'ulimit -n 65536; eval "$KUBERAY_GEN_RAY_START_CMD"'


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Fleet of `servers` workers with the properties `server`; `most` is the autoscaler's maximum.

    `head_memory` is the memory of the head.
    """

    server: ServerSpec
    servers: int = 1
    most: int | None = None
    ray_version: str = ""
    head_memory: str = "8Gi"
    state_claim: str | None = None

    def __post_init__(self) -> None:
        if self.servers < 0 or (self.most is not None and self.most < max(1, self.servers)):
            raise UsageError(
                f"invalid number of servers {self.servers}: must be from 0 to the maximum {self.most}"
            )


def documents(pods: PodOptions, fleet: FleetOptions) -> list[Document]:
    """Return the RayCluster and the gateway's service."""
    most = max(1, fleet.servers) if fleet.most is None else fleet.most
    spec: Document = {
        # Any client that reaches the head's ports could otherwise run code there.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # Only the controller is placed on the head.
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "include-dashboard": "false"},
            "template": _head(pods, fleet),
        },
        "workerGroupSpecs": [
            {
                "groupName": "servers",
                "replicas": fleet.servers,
                "minReplicas": min(fleet.servers, most),
                "maxReplicas": most,
                "labels": labels(fleet.server),
                "rayStartParams": {},
                "template": _worker(pods),
            }
        ],
    }
    if fleet.ray_version:
        spec = {"rayVersion": fleet.ray_version, **spec}
    cluster: Document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": pods.name, "annotations": {OVERWRITE: "true"}},
        "spec": spec,
    }
    selector = {"ray.io/cluster": pods.name, "ray.io/node-type": "head"}
    return [cluster, manifest.service(f"{pods.name}-gateway", selector)]


def _head(pods: PodOptions, fleet: FleetOptions) -> Document:
    up = f"coldstart fleet up --address auto --host 0.0.0.0 --port {manifest.PORT} --state {manifest.STATE}/fleet.json"
    if pods.secret is None:
        # Clients of the cluster address the gateway by the names of its service.
        up += " --insecure --allow-host '*'"
    container: Document = {
        "name": "head",
        # If either process ends, the container ends: the operator creates a new head, which reads the state
        # file.
        "command": ["/bin/bash", "-c", f"{_START} & {up} & wait -n"],
        "env": [
            *manifest.key(pods, f"{PREFIX}_FLEET_UP_API_KEY"),
            *manifest.key(pods, f"{PREFIX}_FLEET_UP_ADMIN_KEY", "admin-key"),
        ],
        "ports": [
            {"name": "http", "containerPort": manifest.PORT},
            {"name": "gcs-server", "containerPort": 6379},
        ],
        "volumeMounts": [{"name": "state", "mountPath": manifest.STATE}],
        **manifest.probes(300),
    }
    made = manifest.pod(
        replace(pods, gpus=0, memory=fleet.head_memory, bundles=(), bundle_image=None), container
    )
    state: Document = {"emptyDir": {}}
    if fleet.state_claim:
        state = {"persistentVolumeClaim": {"claimName": fleet.state_claim}}
    made["spec"]["volumes"].append({"name": "state", **state})
    return made


def _worker(pods: PodOptions) -> Document:
    # Ray's default would run its actors, and so the model servers, at a low priority.
    env = [{"name": "RAY_worker_niceness", "value": "0"}]
    return manifest.pod(pods, {"name": "server", "command": ["/bin/bash", "-c", _START], "env": env})
