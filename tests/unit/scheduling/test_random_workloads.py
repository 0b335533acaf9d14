"""Both forms of the queues on random workloads; the nightly run has as many as `papers/fastserve-random`."""

import pytest

from benchmarks.papers.workloads import check


@pytest.mark.parametrize("form", ["paper", "tempered"])
@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 10_000), marks=pytest.mark.nightly)])
def test_random_workloads_keep_every_invariant(form: str, seeds: range) -> None:
    assert check(seeds, form)["evictions_per_request"] > 0
