"""MEDUSA's stages from the spans of a start."""

import importlib

import pytest

from coldstart.bench import measure
from coldstart.system.timeline import Span
from coldstart.vllm import counting


def span(name: str, start_s: float, end_s: float) -> Span:
    return Span(name, start_s, end_s, "vllm")


def test_stages_do_not_count_a_moment_twice_within_a_stage() -> None:
    spans = [
        span("import torch", 0.0, 2.0),
        span("load the tokenizer", 1.0, 2.5),  # beside the engine
        span("load the model", 2.0, 5.0),
        span("construct model", 2.2, 2.7),
        span("read tensors", 3.0, 5.0),
        span("compile the model or size the KV cache", 5.0, 6.0),
        span("allocate the KV cache", 6.0, 6.5),
        span("compile or warm up", 6.5, 9.0),
        span("compile or warm up", 6.6, 8.9),  # a method that calls the overridden one
    ]
    found = measure.measure_stages(spans, 0.0, 10.0)
    assert found == pytest.approx(
        {"structure": 0.5, "weights": 2.5, "tokenizer": 1.5, "KV": 1.5, "capture": 2.5, "rest": 2.0}
    )


def test_stage_that_began_before_the_launch_counts_from_the_launch() -> None:
    found = measure.measure_stages([span("load the model", -5.0, 1.0)], 0.0, 2.0)
    assert (found["weights"], found["rest"]) == (1.0, 1.0)


def test_stages_are_unknown_without_a_span() -> None:
    assert measure.measure_stages([], 0.0, 1.0) == {}


def test_each_stage_has_a_step_of_vllm() -> None:
    steps = {name for steps in counting.STEPS.values() for name in steps.values()}
    assert all(names & steps for names in measure.STAGE_SPANS.values())


@pytest.mark.slow
def test_installed_vllm_has_each_step() -> None:
    for (module, kind), steps in counting.STEPS.items():
        assert all(hasattr(getattr(importlib.import_module(module), kind), method) for method in steps)
