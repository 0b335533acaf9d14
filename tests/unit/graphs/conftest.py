"""A bundle made once for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs_tools import proven


@pytest.fixture(scope="session")
def bundle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven bundle of the small simulated model."""
    directory = tmp_path_factory.mktemp("graphs") / "bundle"
    proven(directory)
    return directory
