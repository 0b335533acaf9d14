"""Tensors of a pipeline rank: partition, first and last rank, tied embeddings, and all tensors of an unknown layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.weights.load import stage


def test_a_partition_of_the_users_is_followed() -> None:
    assert stage.layers(5, 1, 2, "1,4") == range(1, 5)
    with pytest.raises(ValueError, match="does not divide 5 layers over 2 ranks"):
        stage.layers(5, 0, 2, "1,1")


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_layer_is_on_exactly_one_rank(count: int, size: int) -> None:
    held = [layer for rank in range(size) for layer in stage.layers(count, rank, size)]
    assert held == list(range(count))
