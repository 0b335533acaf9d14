"""One model on LeaderWorkerSet: a group of pods is one pipeline, and the operator ends the group when any pod of it ends.

Nothing of the fleet's controller is needed there: each replica is a group of `ranks` pods, whose leader serves. The operator
sets LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in every container; Kubernetes puts them in the place of $(NAME).
"""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.errors import UsageError
from coldstart.fleet.manifests import manifest
from coldstart.fleet.manifests.manifest import Document, PodOptions

MASTER_PORT = 29500
OURS = ("nnodes", "node_rank", "master_addr", "master_port", "headless", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """`replicas` groups of `ranks` pods each, a pipeline of that many stages, that serve `model` with vLLM's `args`."""

    model: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    replicas: int = 1
    start_s: int = 600

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.replicas < 0:
            raise UsageError("a group has 1 rank at least, and there are 0 groups or more")
        flags = {"--" + name.replace("_", "-") for name in OURS}
        if given := [word for word in self.args if word.partition("=")[0] in flags | {"-pp"}]:
            raise UsageError(f"{', '.join(given)}: the manifest says it of each rank", hint="give --ranks N")


def documents(pods: PodOptions, group: GroupOptions) -> list[Document]:
    """The LeaderWorkerSet and the service of its leaders."""
    role = {"role": "leader"}
    leader = manifest.pod(pods, _leader(pods, group))
    leader["metadata"]["labels"] |= role
    template: Document = {
        "size": group.ranks,
        # Any rank's end is the group's.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": leader,
        "workerTemplate": manifest.pod(pods, _worker(pods, group)),
    }
    workers: Document = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": pods.name},
        "spec": {"replicas": group.replicas, "leaderWorkerTemplate": template},
    }
    selector = {"leaderworkerset.sigs.k8s.io/name": pods.name, **role}
    return [workers, manifest.service(pods.name, selector)]


def _leader(pods: PodOptions, group: GroupOptions) -> Document:
    own = ["--host", "0.0.0.0", "--port", str(manifest.PORT)]
    return {
        "name": "leader",
        "command": _serve(group, own, rank="0"),
        "env": manifest.key(pods, "VLLM_API_KEY"),
        "ports": [{"name": "http", "containerPort": manifest.PORT}],
        **manifest.probes(group.start_s),
    }


def _worker(pods: PodOptions, group: GroupOptions) -> Document:
    return {"name": "worker", "command": _serve(group, [], rank="$(LWS_WORKER_INDEX)", headless=True)}


def _serve(group: GroupOptions, listen: list[str], rank: str, *, headless: bool = False) -> list[str]:
    words = ["coldstart", "serve", group.model, *listen, "--", *group.args]
    if group.ranks == 1:
        return words
    words += ["--pipeline-parallel-size", str(group.ranks), "--nnodes", str(group.ranks), "--node-rank", rank]
    words += ["--master-addr", "$(LWS_LEADER_ADDRESS)", "--master-port", str(MASTER_PORT)]
    return [*words, "--headless"] if headless else words
