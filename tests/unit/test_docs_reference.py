"""The reference pages have the names that the code has: commands, metrics, keys of files, routes and exit codes."""

import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coldstart import errors
from coldstart.fleet.live.status import METRIC_PREFIX, METRICS
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.host import configuration as host_file
from coldstart.host.live import access_control
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import EventRecorder, Metrics
from coldstart.host.model_state import ModelState
from coldstart.host.policies import POLICIES
from coldstart.host.specification import HostSettings, Tier
from coldstart.host.status import HostFacts

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
GENERATED = runpy.run_path(str(ROOT / "docs/_tools/commands.py"))["pages"]()


def read(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


def rows(text: str) -> set[str]:
    """Return the names in code style in the first column of the tables in `text`."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def section(text: str, title: str) -> str:
    """Return the part of a page from a heading or sentence up to the next heading or sentence that ends with a colon."""
    rest = text.partition(title)[2]
    return re.split(r"^(?:#|Keys )", rest, maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("path", GENERATED)
def test_command_page_equals_the_help(path: str) -> None:
    hint = "python docs/_tools/commands.py"
    assert read(path) == GENERATED[path], hint


def families(text: bytes) -> set[str]:
    found = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    return {name for name in found if not name.endswith("_created")}


def status() -> dict[str, Any]:
    model = {
        "name": "x",
        "held": 0,
        "in_flight": 0,
        "held_bytes": 0,
        "gpu_memory_bytes": 0,
        "state": ModelState.READY,
    }
    host = dict.fromkeys(("memory_bytes", "memory_used_bytes", "runtime_template_bytes"), 0) | {
        "client_keys_error": ""
    }
    requests = {"total": 0, "hits": 0, "refused": {"429": 1}}
    return {"host": host, "requests": requests, "starts": {"departures": 0}, "models": [model]}


def test_metrics_page_names_every_metric_of_a_host() -> None:
    page = read("metrics.md")
    metrics = EventRecorder(Log(quiet=True), HostFacts(), status).metrics
    assert rows(section(page, "## Host")) == families(metrics.format_text())
    assert {str(state) for state in ModelState} == set(
        re.findall(r"`(\w+)`", page.partition("States are")[2])[: len(ModelState)]
    )


def test_metrics_page_names_every_metric_of_a_fleet() -> None:
    gateway = {
        **dict.fromkeys(("requests", "readmitted", "resumed", "migrated", "migrated_with_kv"), 0),
        "migrations_failed": 0,
        "refused": {"429": 1},
    }
    models = [{"name": "x", "groups": [], **dict.fromkeys(("waiting", "in_flight", "hung", "serving"), 0)}]
    status = {"gateway": gateway, "models": models}
    found = families(Metrics(lambda: status, METRIC_PREFIX, METRICS).format_text())
    assert rows(section(read("metrics.md"), "## Fleet")) == found


def list_names(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in fields(kind)}


def test_configuration_page_names_every_key_of_a_host_file() -> None:
    part = read("configuration.md").partition("## Host file")[2].partition("## Fleet file")[0]
    assert rows(section(part, "Keys at the top:")) == list_names(HostSettings) | {"idle_s", "on_miss"}
    expected = list_names(host_file.ModelTable) - {"name", "weights_from", "gpu_bytes"}
    assert rows(section(part, "Keys of a table `[models.NAME]`:")) == expected
    assert rows(section(part, "Keys of a table `[[models.NAME.tiers]]`")) == list_names(Tier)
    assert all(f"`{name}`" in part for name in POLICIES)


def test_configuration_page_names_every_key_of_a_fleet_file() -> None:
    part = read("configuration.md").partition("## Fleet file")[2]
    hidden = {"name", "costs", "shares", "joins", "recorded", "unavailable"}
    assert rows(section(part, "Keys at the top:")) == list_names(FleetSettings)
    assert rows(section(part, "Keys of a table `[servers.NAME]`:")) == list_names(ServerSpec) - hidden | {
        "count"
    }
    assert rows(section(part, "Keys of a table `[models.NAME]`:")) == list_names(
        FleetModel, Costs
    ) - hidden | {"count"}


def test_http_page_names_every_route() -> None:
    page = read("http-api.md")
    assert tuple(re.findall(r"^- `POST (\S+)`", page, re.M)) == access_control.FORWARDED_PATHS
    assert tuple(re.findall(r"^- `GET (\S+)`", page, re.M)) == access_control.READ_PATHS
    source = "".join(
        (ROOT / "coldstart" / name).read_text()
        for name in (
            "host/live/app.py",
            "host/live/host_routes.py",
            "host/live/run.py",
            "fleet/live/admin.py",
        )
    )
    routes = {route.replace(":path", "") for route in re.findall(r'Route\("([^"]+)"', source)}
    assert {row.split()[1] for row in rows(page) if row.startswith(("GET", "POST"))} == routes


def test_exit_code_page_names_every_code() -> None:
    codes = {0, errors.CHECK_FAILED, errors.ERROR, errors.NO_BUNDLE, errors.AUTH_REQUIRED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", read("exit-codes.md"), re.M)} == codes | {
        130,
        143,
    }
