"""The fleet on KubeRay: a RayCluster whose head runs gateway and controller, and whose workers are the fleet's servers.

A worker's labels say what it can (bytes of a device, bytes/s of its link and to its device); by them the controller knows
it for a server. There is no RayService: its applications are Ray Serve's, and no token of this fleet passes through Ray.
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
"""With it the operator runs our words, and gives its own start command in KUBERAY_GEN_RAY_START_CMD."""
_START = 'ulimit -n 65536; eval "$KUBERAY_GEN_RAY_START_CMD"'


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """`servers` workers, each as `server` says; `most` is up to where an autoscaler may go. `head_memory` is the head's."""

    server: ServerSpec
    servers: int = 1
    most: int | None = None
    ray_version: str = ""
    head_memory: str = "8Gi"
    state_claim: str | None = None

    def __post_init__(self) -> None:
        if self.servers < 0 or (self.most is not None and self.most < max(1, self.servers)):
            raise UsageError("servers from 0, and no more than the most there may be")


def documents(pods: PodOptions, fleet: FleetOptions) -> list[Document]:
    """The RayCluster and the gateway's service."""
    most = max(1, fleet.servers) if fleet.most is None else fleet.most
    spec: Document = {
        # Whoever reaches the head's ports could run code there.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # Nothing but the controller is to be placed there.
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
    container: Document = {
        "name": "head",
        # Either one's end is the container's: the operator makes another head, the state file the fleet.
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
    # Ray would have its actors, and so the model servers, run at the lowest priority but few.
    env = [{"name": "RAY_worker_niceness", "value": "0"}]
    return manifest.pod(pods, {"name": "server", "command": ["/bin/bash", "-c", _START], "env": env})
