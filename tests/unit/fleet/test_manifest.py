"""Kubernetes manifests, checked by public schemas: kubernetes-validate for core kinds, definitions for the others.

Of a custom kind's definition its own members are kept here (tests/tools/crd_facts.py made them); its pods are a core kind.
"""

from __future__ import annotations

import copy
import json
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from coldstart.artifacts.archive import export_archive
from coldstart.artifacts.store import Store
from tools.bundles import publish

from coldstart.errors import UsageError
from coldstart.fleet import labels
from coldstart.fleet.manifests import kuberay, leaderworkerset, manifest
from coldstart.fleet.manifests.kuberay import FleetOptions
from coldstart.fleet.manifests.leaderworkerset import GroupOptions
from coldstart.fleet.manifests.manifest import PodOptions
from coldstart.fleet.specification import ServerSpec

KUBERNETES = "1.37.0"
FACTS = Path(__file__).parents[2] / "support" / "kubernetes"
SERVER = ServerSpec("server", 24 * 10**9, 6.7e9, 12e9, 4)
MOUNTED = PodOptions("llama", "example.com/coldstart:1", "64Gi", gpus=4, bundle_image="example.com/bundles:1")
PULLED = PodOptions(
    "llama",
    "example.com/coldstart:1",
    "64Gi",
    bundles=("oci://example.com/a:v1", "hf://org/b"),
    secret="fleet",
    hub_claim="hub",
)
PIPELINE = GroupOptions("meta-llama/Llama-2-13b-hf", ("--max-model-len", "4096"), ranks=2, replicas=3)
FLEETS = (FleetOptions(SERVER), FleetOptions(SERVER, 0, 8, "2.60.0", state_claim="state"))
GROUPS = (PIPELINE, GroupOptions("m"))


def _checked(document: Any) -> None:
    """Raise an error for a document that the API server would refuse."""
    facts = {facts["kind"]: facts for facts in map(_read, FACTS.glob("*.json"))}.get(document["kind"])
    if facts is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    assert document["apiVersion"] == f"{facts['group']}/{facts['version']}"
    jsonschema.validate(document, facts["schema"])
    for template in _templates(document, facts["schema"]):
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _templates(document: Any, schema: Any) -> list[Any]:
    """Yield the pod templates of a document."""
    if schema.get("x-pod-template"):
        return [document]
    if isinstance(document, list):
        return [found for one in document for found in _templates(one, schema.get("items", {}))]
    members = schema.get("properties", {})
    return (
        [found for name in members if name in document for found in _templates(document[name], members[name])]
        if isinstance(document, dict)
        else []
    )


def _every() -> list[list[Any]]:
    made = [kuberay.documents(pods, fleet) for pods in (MOUNTED, PULLED) for fleet in FLEETS]
    return [
        *made,
        *(leaderworkerset.documents(pods, group) for pods in (MOUNTED, PULLED) for group in GROUPS),
    ]


@pytest.mark.parametrize("documents", _every())
def test_published_schemas_accept_the_documents(documents: list[Any]) -> None:
    loaded = list(yaml.safe_load_all(manifest.text(documents)))
    assert loaded == documents
    for document in loaded:
        _checked(document)


def test_schemas_refuse_invalid_documents() -> None:
    lws, service = leaderworkerset.documents(MOUNTED, PIPELINE)
    ray, _ = kuberay.documents(MOUNTED, FLEETS[0])
    spoilt = []
    for document, path, value in (
        (lws, ("spec", "leaderWorkerTemplate", "restartPolicy"), "Sometimes"),
        (lws, ("spec", "leaderWorkerTemplate", "leaders"), 1),
        (lws, ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "volume"), []),
        (ray, ("spec", "headGroupSpec", "template", "spec", "containers", 0, "port"), 1),
        (ray, ("spec", "workerGroupSpecs", 0, "replicas"), "two"),
        (service, ("spec", "ports", 0, "port"), "http"),
    ):
        bad: Any = copy.deepcopy(document)
        at = bad
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = value
        spoilt.append(bad)
    for bad in spoilt:
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            _checked(bad)


def test_each_rank_of_a_pipeline_knows_its_place() -> None:
    template = leaderworkerset.documents(MOUNTED, PIPELINE)[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = (
        template[role]["spec"]["containers"][0]["command"] for role in ("leaderTemplate", "workerTemplate")
    )
    assert template["size"] == 2
    assert leader[:2] == ["coldstart", "serve"] and leader[leader.index("--node-rank") + 1] == "0"
    assert worker[worker.index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)" and worker[-1] == "--headless"
    assert {"--nnodes", "--master-addr", "--pipeline-parallel-size"} < set(leader) & set(worker)
    alone = leaderworkerset.documents(MOUNTED, GroupOptions("m"))[0]["spec"]["leaderWorkerTemplate"]
    assert "--nnodes" not in str(alone)


def test_bundles_come_mounted_or_pulled_but_not_both() -> None:
    mounted = leaderworkerset.documents(MOUNTED, PIPELINE)[0]["spec"]["leaderWorkerTemplate"][
        "workerTemplate"
    ]
    assert "initContainers" not in mounted["spec"]
    volume = next(one for one in mounted["spec"]["volumes"] if one["name"] == "bundles")
    assert volume["image"]["reference"] == "example.com/bundles:1"
    pulled = kuberay.documents(PULLED, FLEETS[0])[0]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (init,) = pulled["initContainers"]
    assert init["command"][-2:] == ["oci://example.com/a:v1", "hf://org/b"]
    with pytest.raises(UsageError, match="not both"):
        PodOptions("a", "i", "1Gi", bundle_image="b", bundles=("c",))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "Llama_2"}, "invalid Kubernetes name"),
        ({"memory": "64 GB"}, "invalid Kubernetes quantity"),
        ({"gpus": -1}, "GPUs"),
    ],
)
def test_manifest_refuses_options_that_kubernetes_would_refuse(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PodOptions(**({"name": "a", "image": "i", "memory": "1Gi"} | options))


@pytest.mark.parametrize("words", [("--nnodes", "2"), ("-pp", "2"), ("--master-addr=here",), ("--headless",)])
def test_manifest_refuses_rank_arguments_of_the_user(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="the manifest sets this for each rank"):
        GroupOptions("m", words)


def test_manifest_refuses_groups_and_fleets_without_a_size() -> None:
    for refused in (lambda: GroupOptions("m", ranks=0), lambda: FleetOptions(SERVER, 3, 2)):
        with pytest.raises(UsageError):
            refused()


def test_a_server_is_known_by_its_labels() -> None:
    given = labels.labels(SERVER)
    assert all(len(value) <= 63 and value.isdigit() for value in given.values())
    assert labels.server("server", given) == SERVER
    assert labels.server("head", {"ray.io/node-id": "x"}) is None
    with pytest.raises(UsageError, match="invalid server labels"):
        labels.server("x", {**given, "coldstart-load": "fast"})
    ray = kuberay.documents(MOUNTED, FLEETS[0])[0]["spec"]
    assert labels.server("server", ray["workerGroupSpecs"][0]["labels"]) == SERVER


def test_extracted_archive_is_a_readable_store(store: Store, tmp_path: Path) -> None:
    """Extract the archive as in an image and make it read-only like the mounted volume."""
    bundle = publish(store, tmp_path / "scratch")
    archive, root = tmp_path / "bundles.tar", tmp_path / "mounted"
    export_archive([bundle], archive)
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    for place in (root, *root.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    assert [found.digest for found in Store(root).list()] == [bundle.digest]
    assert Store(root).list()[0].verify("checksum") == []
