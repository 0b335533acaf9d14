"""Bundles that are created once for all tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.graphs_tools import proven
from support.graphs_worker import here, materialize, replace_worker

__all__ = ["bundle_directory", "here", "rounds_bundle"]


@pytest.fixture(scope="session")
def bundle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven bundle of the small simulated model."""
    directory = tmp_path_factory.mktemp("graphs") / "bundle"
    proven(directory)
    return directory


@pytest.fixture(scope="session")
def rounds_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that simulated workers recorded and proved."""
    with pytest.MonkeyPatch.context() as patch:
        return materialize(replace_worker(patch), tmp_path_factory.mktemp("rounds"))
