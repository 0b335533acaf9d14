"""The Helm chart: its values, and what helm renders from them. Rendering is skipped where there is no helm."""

import copy
import json
import os
import shutil
import subprocess
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tools.command_line import check_pod

from coldstart.host import configuration
from coldstart.host.configuration import Profile

ROOT = Path(__file__).parents[2]
CHART = ROOT / "examples/helm/coldstart"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
KUBERNETES = "1.37.0"
HELM = shutil.which("helm") or ROOT / ".cache/helm/helm"
GUIDE = (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
KEY: dict[str, Any] = {"apiKey": {"existingSecret": "key"}}
CASES: dict[str, dict[str, Any]] = {
    "serve": KEY,
    "guide": yaml.safe_load(textwrap.dedent(GUIDE.partition("```yaml\n")[2].partition("```")[0])),
    "serve-all": KEY
    | {
        "bundles": {"pull": ["oci://registry.example.com/a:v1", "oci://registry.example.com/b:v1"],
                    "registrySecret": "registry", "persistence": {"storageClass": "fast"}},
        "image": {"tag": "1.2.3", "pullSecrets": ["pull"]},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
        "podSecurityContext": {"fsGroup": 1000},
    },
    "serve-cpu": {"insecure": True, "gpu": {"count": 0}, "hubClaim": "",
                  "bundles": {"keysConfigMap": "", "persistence": {"enabled": False}}},
    "serve-digest": KEY | {"image": {"digest": "sha256:" + "0" * 64, "tag": "1.2.3"}},
    "host": KEY | {"command": "host", "serviceMonitor": {"enabled": True}},
    "host-insecure": {"command": "host", "insecure": True, "bundles": {"persistence": {"existingClaim": "mine"}}},
}  # fmt: skip
Documents = dict[str, dict[str, Any]]


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge values as helm does: maps are merged, everything else is replaced."""
    merged = copy.deepcopy(base)
    for name, value in more.items():
        known = merged.get(name)
        merged[name] = merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def run_helm(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    if not Path(HELM).exists():
        pytest.skip("no helm: tests/tools/fetch-helm.sh")
    homes = {f"HELM_{name}_HOME": str(directory / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return subprocess.run(
        [str(HELM), *words], env={**os.environ, **homes}, capture_output=True, text=True, check=False
    )


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Any], Documents]:
    """The values of one case, and the documents that helm renders from them by kind."""
    given = CASES[request.param]
    (tmp_path / "values.yaml").write_text(json.dumps(given))
    done = run_helm(tmp_path, "template", "llama", str(CHART), "--values", str(tmp_path / "values.yaml"))
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len({one["kind"] for one in documents}) == len(documents)
    return merge(VALUES, given), {one["kind"]: one for one in documents}


def find_server(documents: Documents) -> dict[str, Any]:
    (server,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(server)


def test_schema_is_valid_and_knows_every_value() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)

    def compare(values: dict[str, Any], schema: dict[str, Any]) -> None:
        if "properties" in schema:
            assert set(values) == set(schema["properties"]) - {"global"}
            for name, value in values.items():
                if isinstance(value, dict):
                    compare(value, schema["properties"][name])

    compare(VALUES, SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {},  # neither a key nor `insecure`
        KEY | {"insecure": True},
        KEY | {"command": "up"},
        KEY | {"replica": 2},
        KEY | {"serve": {"vllmArgs": [4096]}},
        KEY | {"serve": {"options": ["--insecure"]}},
        KEY | {"host": {"options": ["--insecure"]}},
        KEY | {"host": {"options": ["--api-key=secret"]}},
        KEY | {"gpu": {"count": "1"}},
        KEY | {"sharedMemory": "16 GB"},
    ],
    ids=json.dumps,
)
def test_schema_refuses_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(merge(VALUES, wrong))


def test_the_host_file_in_the_values_is_a_host() -> None:
    host = configuration.parse(
        tomllib.loads(VALUES["host"]["file"]), lambda launch: Profile(16 << 30, 1.0, "bundle")
    )
    assert [spec.name for spec in host.models] == ["llama2-7b"]


def test_helm_finds_no_fault_in_the_chart(tmp_path: Path) -> None:
    done = run_helm(tmp_path, "lint", "--strict", str(CHART), "--set", "apiKey.existingSecret=key")
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout + done.stderr


def test_kubernetes_accepts_what_is_rendered(rendered: tuple[dict[str, Any], Documents]) -> None:
    values, documents = rendered
    persistence = values["bundles"]["persistence"]
    kinds = {"Deployment", "Service"}
    kinds |= (
        {"PersistentVolumeClaim"} if persistence["enabled"] and not persistence["existingClaim"] else set()
    )
    kinds |= {"ConfigMap"} if values["command"] == "host" else set()
    kinds |= {"ServiceMonitor"} if values["serviceMonitor"]["enabled"] else set()
    assert set(documents) == kinds
    for kind, document in documents.items():
        if kind != "ServiceMonitor":  # a kind of the Prometheus operator
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_parts_of_a_release_refer_to_each_other(rendered: tuple[dict[str, Any], Documents]) -> None:
    values, documents = rendered
    pod = documents["Deployment"]["spec"]["template"]
    selector = documents["Service"]["spec"]["selector"]
    assert selector == documents["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    (port,) = documents["Service"]["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in find_server(documents)["ports"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    check_pod(pod["spec"])
    if claim := documents.get("PersistentVolumeClaim"):
        assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    if values["command"] == "host":
        assert volumes["host-file"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
        assert tomllib.loads(documents["ConfigMap"]["data"]["host.toml"])["memory"] == "60GiB"
    if monitor := documents.get("ServiceMonitor"):
        labels = documents["Service"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (endpoint,) = monitor["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
        assert endpoint["authorization"]["credentials"] == {"name": "key", "key": "api-key"}


def test_pod_has_what_a_server_needs(rendered: tuple[dict[str, Any], Documents]) -> None:
    values, documents = rendered
    pod, server = documents["Deployment"]["spec"]["template"]["spec"], find_server(documents)
    assert pod["enableServiceLinks"] is False
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == values["startSeconds"]
    (shm,) = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": "16Gi"}
    wanted = {"nvidia.com/gpu": str(values["gpu"]["count"])} if values["gpu"]["count"] else {}
    expected = {"cpu": "8", "memory": "64Gi", **wanted}
    assert server["resources"] == {"limits": expected, "requests": expected}
