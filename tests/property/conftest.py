import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# The modules of this directory drive vLLM's own scheduler class; those of its subdirectories import no vLLM.
collect_ignore = [] if find_spec("vllm") else [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
