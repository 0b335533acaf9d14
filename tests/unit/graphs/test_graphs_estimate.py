"""The cost model of the offline phase: its parts and its estimates for common model sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coldstart.graphs import estimate

EIGHT_B = estimate.ModelShape(33, 16_000_000_000)


def test_a_model_of_33_layers_is_recorded_within_15_minutes() -> None:
    assert sum(estimate.seconds(EIGHT_B).values()) < 900


def test_every_piece_beside_the_full_graphs_would_not_be() -> None:
    pieces = replace(EIGHT_B, sizes=51 * 35, nodes_a_layer=11 / 35)
    assert sum(estimate.seconds(pieces).values()) > 3600


def test_several_ranks_have_caches_and_no_graphs() -> None:
    parts, held = (work(replace(EIGHT_B, ranks=8)) for work in (estimate.seconds, estimate.disk))
    assert not {"poisoning", "proof", "captures"} & set(parts) and "graphs" not in held
    assert held["compile caches"] == 8 * estimate.disk(EIGHT_B)["compile caches"]


@pytest.mark.parametrize("more", [{"layers": 66}, {"weight_bytes": 1 << 36}, {"sizes": 102}])
def test_more_of_anything_costs_more(more: dict[str, int]) -> None:
    bigger = replace(EIGHT_B, **more)
    assert sum(estimate.seconds(bigger).values()) > sum(estimate.seconds(EIGHT_B).values())
