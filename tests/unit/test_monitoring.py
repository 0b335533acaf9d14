"""The dashboard and the alerts of examples/monitoring parse, and name only metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
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
