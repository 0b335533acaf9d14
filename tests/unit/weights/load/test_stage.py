"""Tensors of a pipeline rank: partition, first and last rank, tied embeddings, and all tensors of an unknown layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.weights.load import stage


def test_opt_keeps_everything_but_layers_on_every_rank() -> None:
    names = ["model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight"]
    names += ["model.decoder.layers.1.fc1.weight", "model.decoder.final_layer_norm.weight"]
    config = {"architectures": ["OPTForCausalLM"], "num_hidden_layers": 2}
    assert stage.select_names(names, config, [1], 2) == [names[0], names[2], names[3]]


def test_a_partition_of_the_users_is_followed() -> None:
    assert stage.layers(5, 1, 2, "1,4") == range(1, 5)
    with pytest.raises(ValueError, match="does not divide 5 layers over 2 ranks"):
        stage.layers(5, 0, 2, "1,1")


@given(st.integers(1, 200), st.integers(1, 16))
def test_every_layer_is_on_exactly_one_rank(count: int, size: int) -> None:
    held = [layer for rank in range(size) for layer in stage.layers(count, rank, size)]
    assert held == list(range(count))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_nodes_divide_the_ranks(size: int, tensor: int, nodes: int) -> None:
    if size * tensor % nodes == 0:
        held = {rank for node in range(nodes) for rank in stage.local_ranks(size, tensor, nodes, node)}
        assert held == set(range(size))
