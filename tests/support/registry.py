"""A running registry as a fixture; see `tools.docker_registry`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tools.docker_registry import Unavailable, serving


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a running registry."""
    try:
        with serving(tmp_path_factory.mktemp("registry")) as address:
            yield address
    except Unavailable as reason:
        pytest.skip(str(reason))
