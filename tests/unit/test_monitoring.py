"""The dashboard and the alerts of examples/monitoring parse, and name only metrics and labels that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "examples/monitoring/grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "examples/monitoring/prometheus-rules.yaml").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
# What Grafana replaces before Prometheus sees an expression.
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}
# vLLM's own labels, and the one that a host adds.
VLLM_LABELS = {"model", "model_name", "engine"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    return [*queries, *(rule["expr"] for rule in ALERTS)]


def documented() -> dict[str, set[str]]:
    """Return the labels of each series in the metrics reference, which other tests compare with the product."""
    known: dict[str, set[str]] = {}
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8").partition("## Server")[0]
    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE):
        given = set(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            known |= {f"{name}_{end}": given for end in ("sum", "count")} | {f"{name}_bucket": given | {"le"}}
        else:
            known[name] = given
    return known


def vllm_series() -> dict[str, set[str]]:
    """Return the series of vLLM's metrics by their source, which is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("vLLM is not installed: coldstart install cpu")
    (directory,) = found.submodule_search_locations
    source = Path(directory, "v1/metrics/loggers.py").read_text(encoding="utf-8")
    names = re.findall(r'name="(vllm:\w+)"', source)
    assert len(names) > 10
    ends = {"": set[str](), "_total": set[str](), "_bucket": {"le"}}
    return {name + end: VLLM_LABELS | more for name in names for end, more in ends.items()}


def nodes(expression: Any) -> Iterator[Any]:
    """Yield an expression and all expressions inside it."""
    yield expression
    parts = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
    for part in [*parts, *(getattr(expression, "args", None) or ())]:
        if part is not None:
            yield from nodes(part)


def selectors(expression: Any) -> list[Any]:
    return [one for one in nodes(expression) if isinstance(one, promql_parser.VectorSelector)]


@pytest.mark.parametrize("text", expressions())
def test_expression_names_series_and_labels_that_exist(text: str) -> None:
    known = documented() | (vllm_series() if "vllm:" in text else {})
    parsed = promql_parser.parse(text)
    found = selectors(parsed)
    # The parser's tree is complete: each metric in the text is in it.
    assert {one.name for one in found} == set(re.findall(r"\b(?:coldstart_|vllm:)\w+", text))
    for one in found:
        assert one.name in known, one.name
        assert {matcher.name for matcher in one.matchers.matchers} <= known[one.name], text
    for one in nodes(parsed):
        if isinstance(one, promql_parser.AggregateExpr) and one.modifier is not None:
            inside = [known[selector.name] for selector in selectors(one)]
            assert set(one.modifier.labels) <= set.union(*inside), text


def test_each_alert_has_a_severity_and_a_summary_with_labels_that_its_expression_keeps() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        parsed = promql_parser.parse(rule["expr"])
        outer = [one for one in nodes(parsed) if isinstance(one, promql_parser.AggregateExpr)]
        kept = set(outer[0].modifier.labels if outer[0].modifier else ()) if outer else {"model"}
        assert used <= kept, rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
