"""The weights that a launch plan requests are those of the launched model only."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.weights import weights_plan

pytestmark = pytest.mark.vllm


def test_a_reload_from_another_path_has_the_weights_of_that_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.config import LoadConfig

    from coldstart.vllm.weights import loader

    launched, other = tmp_path / "launched", tmp_path / "other"
    for number, directory in enumerate((launched, other)):
        directory.mkdir()
        save_file({"weight": np.full(4, number)}, directory / "model.safetensors")
    request = WeightsRequest(
        str(launched), weights_plan.save_plan(weights_plan.build_plan(launched), tmp_path)
    )
    LaunchPlan(Arguments(["--model", str(launched)]), weights_from=request).install()
    monkeypatch.setattr(loader, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(loader, "_rank_names", lambda names, _: names)
    config = SimpleNamespace(model=str(other), revision=None)
    loaded = loader.ColdLoader(LoadConfig()).get_all_weights(config, torch.nn.Module())
    assert {name: tensor.tolist() for name, tensor in loaded} == {"weight": [1] * 4}
