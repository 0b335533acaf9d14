import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the scheduler's property tests drive vLLM's own scheduler class")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's configuration; no weights are read."""
    return tmp_path_factory.mktemp("model") / "tiny-opt"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
