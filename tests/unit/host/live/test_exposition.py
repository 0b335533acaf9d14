"""Merged Prometheus expositions, read by prometheus_client's parser."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from coldstart.host.live import server_reads

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


def _server(value: str, amount: float = 3.0) -> str:
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    Histogram("vllm:e2e_seconds", "Latency \\ in\nseconds.", labels, registry=registry).labels(
        value, "0"
    ).observe(amount)
    Counter("vllm:tokens", "Tokens.", labels, registry=registry).labels(value, "0").inc(amount)
    Gauge("process_start_seconds", "Start.", registry=registry).set(amount)
    return generate_latest(registry).decode()


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    found = [
        (sample.name, dict(sample.labels), sample.value) for one in parse(text) for sample in one.samples
    ]
    keys = [(name, *sorted(labels.items())) for name, labels, _ in found]
    assert len(set(keys)) == len(keys)
    return found


@given(TEXT, TEXT, st.floats(0, allow_nan=False))
def test_each_sample_is_retained_with_its_model(name: str, value: str, amount: float) -> None:
    text = _server(value, amount)
    merged, omitted = server_reads.merge("", [(name, text)])
    assert not omitted
    assert _samples(merged) == [
        (sample, {"model": name, **labels}, number) for sample, labels, number in _samples(text)
    ]


def test_servers_share_one_head_of_each_family() -> None:
    own = _server("host").replace("vllm:", "coldstart_host_").replace("process_", "coldstart_host_process_")
    merged, omitted = server_reads.merge(own, [("a", _server("x")), ("b", _server("y"))])
    assert not omitted
    heads = [line for line in merged.splitlines() if line.startswith(("# HELP", "# TYPE"))]
    assert len(heads) == len(set(heads)) and len([one for one in heads if "vllm:tokens_total" in one]) == 2
    families = [family.name for family in parse(merged)]
    assert len(families) == len(set(families))
    assert len(_samples(merged)) == 3 * len(_samples(own))
    assert merged.startswith(own.splitlines()[0])


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ('model="x"', {"exported_model": "x"}),
        ('y=",model=",model="x",', {"y": ",model=", "exported_model": "x"}),
        (r'y="} model=\"x\""', {"y": '} model="x"'}),
        ('submodel="x"', {"submodel": "x"}),
        ("", {}),
    ],
)
def test_label_of_the_same_name_is_renamed(labels: str, wanted: dict[str, str]) -> None:
    merged, omitted = server_reads.merge("", [('q"\\\n', f"up{{{labels}}} 1 1395066363000\n")])
    assert not omitted
    (found,) = _samples(merged)
    assert found == ("up", {"model": 'q"\\\n', **wanted}, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "<html>", "up{", 'up{a="b} 1', 'up{a="b"c="d"} 1', "up one", "1up 1", "up 1 2 3", "# TYPE up pie\nup 1",
        "# TYPE own counter\nown 1", 'up{a="\nb"} 1',
    ],
)  # fmt: skip
def test_invalid_or_contradicting_text_is_omitted(text: str) -> None:
    own = "# TYPE own gauge\nown 1.0\n"
    merged, omitted = server_reads.merge(own, [("bad", text), ("good", "up 2\n")])
    assert omitted == ["bad"]
    assert _samples(merged) == [("own", {}, 1.0), ("up", {"model": "good"}, 2.0)]


def test_long_line_of_a_broken_server_is_refused_in_linear_time() -> None:
    text: Any = "up{" + 'a="b",' * 200_000 + "!"
    assert server_reads.merge("", [("bad", text)])[1] == ["bad"]
