"""Schedulers on two ranks whose KV pool holds a fraction of the requests: the answers are those of FCFS on one rank.

Invariant: a rank keeps its own heads' or layers' share of what is evicted, and nothing runs before every rank has it back.
"""

import pytest
from tools.bursts import ARGUMENTS, LOCAL, POOL_BYTES, SWAPPING, body, count_overtaken, counters, together
from tools.machine import Machine, Served

# Skip-join MLFQ on one rank is in test_e2e_scheduler.py, and on two with fakes in property/test_scheduler.py. DeadlinePolicy
# on one rank, with the priorities and classes of clients, is in property/test_deadline_carrier.py.
pytestmark = [pytest.mark.vllm, pytest.mark.nightly]

RANKS = 2
FLAGS = (*ARGUMENTS, str(POOL_BYTES // RANKS), "--enforce-eager")
DEADLINES = ("--scheduler", "deadline", "--batch", "4", "--deadline-factor", "1e6")
"""With this factor the longer prompt has the later deadline, however late the shorter one arrives."""
LENGTHS = [20 + (37 * number) % 150 for number in range(20)]


@pytest.fixture(scope="module")
def expected(machine: Machine) -> list[list[int]]:
    """Return the answers of vLLM's scheduler on one rank with the whole pool."""
    flags = (*ARGUMENTS, str(POOL_BYTES), "--enforce-eager")
    with machine.serving("tiny-llama", "--on-miss", "warn", vllm=flags) as stock:
        return together(stock, [body(n, tokens) for n, tokens in enumerate(LENGTHS)])


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_swapping_on_two_ranks_answers_as_fcfs(machine: Machine, expected: list[list[int]], way: str) -> None:
    here, flags = Machine(machine.root, LOCAL), (*FLAGS, f"--{way}-parallel-size", str(RANKS))
    with here.serving("tiny-llama", "--on-miss", "warn", *SWAPPING, vllm=flags) as ours:
        check_fallbacks(ours)
        assert together(ours, [body(n, tokens) for n, tokens in enumerate(LENGTHS)]) == expected
        moved = counters(ours)
        assert all(moved[name] > 0 for name in ("demotions", "parks", "evictions", "loads")), moved


@pytest.mark.parametrize("way", ["pipeline", "tensor"])
def test_deadlines_order_requests_of_two_ranks(machine: Machine, expected: list[list[int]], way: str) -> None:
    here, flags = Machine(machine.root, LOCAL), (*FLAGS, f"--{way}-parallel-size", str(RANKS))
    with here.serving("tiny-llama", "--on-miss", "warn", *DEADLINES, vllm=flags) as ours:
        check_fallbacks(ours)
        assert together(ours, [body(n, tokens) for n, tokens in enumerate(LENGTHS)]) == expected
        long = [body(number, 20, prompt_tokens=200) for number in range(12)]
        assert count_overtaken(ours, long, body(12, 20, prompt_tokens=4)) >= 6


def test_the_ranks_of_a_pipeline_restore_their_compiled_code(machine: Machine) -> None:
    here, flags = Machine(machine.root, LOCAL), (*ARGUMENTS, str(1 << 26), "--pipeline-parallel-size", "2")
    here.run("materialize", "tiny-llama", "--", *flags)
    with here.serving("tiny-llama", vllm=flags) as restored:
        assert restored.report["fast_path"]["compile"] and not restored.report["fallbacks"]
        # A spawned rank would import everything again.
        assert not [one for one in restored.family() if "spawn_main" in " ".join(one.cmdline())]
        tokens = restored.tokens()
    with here.serving("tiny-llama", "--on-miss", "warn", vllm=(*flags, "--enforce-eager")) as traced:
        assert traced.tokens() == tokens


def check_fallbacks(served: Served) -> None:
    """Check that no fallback occurred but for sections that exist for single ranks only."""
    sections = {fallback["section"] for fallback in served.report["fallbacks"]}
    assert sections <= {"bundle", "iterations"}, served.report["fallbacks"]
