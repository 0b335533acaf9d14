"""Skip-join MLFQ on a real server whose KV pool holds a quarter of its requests returns the answers of FCFS.

Invariant: the order of requests never changes an answer, also when requests are parked, swapped out or loaded back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tools.bursts import ARGUMENTS, POOL_BYTES, SWAPPING, body, count_overtaken, counters, metrics, together
from tools.machine import VLLM, Machine, Served

from coldstart.launch.prepare import build_inductor_env

pytestmark = pytest.mark.vllm

SMALL = (*ARGUMENTS, str(POOL_BYTES), "--enforce-eager")
REQUESTS, URGENT_TOKENS = 12, 200
"""Five blocks per request, eight for the urgent one."""

COUNTERS = {"demotions", "promotions", "parks", "evictions", "loads", "blocks_evicted"}


@contextmanager
def forked(machine: Machine, *options: str) -> Iterator[Served]:
    """Serve with the small pool from the runtime template, which needs no bundle of these arguments."""
    how = ("--on-miss", "warn", "--mode", "template-runtime")
    # Inductor's settings of the bundle of the template, which a fork must have, too.
    equal = Machine(machine.root, build_inductor_env(machine.root / "inductor"))
    with equal.serving("tiny-llama", *how, *options, vllm=SMALL) as served:
        assert served.report["mode"] == "template-runtime", served.report["fallbacks"]
        assert {one["section"] for one in served.report["fallbacks"]} <= {"bundle", "iterations"}
        yield served


@pytest.fixture(scope="module")
def expected(machine: Machine, bundle: Any) -> Iterator[list[list[int]]]:
    """Return the answers of vLLM's scheduler; start a runtime template for all tests."""
    machine.run("template", "start", "tiny-llama", "--level", "runtime", "--", *VLLM)
    with forked(machine) as stock:
        answers = together(stock, [body(number) for number in range(REQUESTS)])
        assert counters(stock) == {}
    yield answers
    machine.run("template", "stop", "--level", "runtime", "--force")


def test_mlfq_answers_equal_those_of_fcfs(machine: Machine, expected: list[list[int]]) -> None:
    with forked(machine, *SWAPPING) as ours:
        before = counters(ours)
        assert set(before) >= COUNTERS
        assert together(ours, [body(number) for number in range(REQUESTS)]) == expected
        moved = {name: value - before[name] for name, value in counters(ours).items()}
        assert all(moved[name] > 0 for name in COUNTERS - {"promotions"}), moved
        assert moved["blocks_evicted"] >= moved["evictions"] and loaded_bytes(ours) > 0
        # An urgent request comes last, and its negative priority keeps it first. The others are longer than elsewhere: on a
        # busy machine many of short ones end before this process sees that all arrived.
        others = [body(number, URGENT_TOKENS) for number in range(REQUESTS)]
        late = count_overtaken(ours, others, body(REQUESTS, URGENT_TOKENS) | {"priority": -1})
        assert late >= REQUESTS // 2, f"{REQUESTS - late} of {REQUESTS} ended before the urgent one"


def loaded_bytes(served: Served) -> float:
    """Return the bytes of KV that vLLM's connector has loaded from the host."""
    loaded = [line for line in metrics(served) if line.startswith("vllm:kv_offload_load_bytes_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in loaded)
