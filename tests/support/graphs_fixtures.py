"""A bundle that is created once for all tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.graphs_processes import Launches
from support.graphs_tools import proven

from coldstart.graphs import offline


@pytest.fixture(scope="session")
def bundle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven bundle of the small simulated model."""
    directory = tmp_path_factory.mktemp("graphs") / "bundle"
    proven(directory)
    return directory


@pytest.fixture(scope="session")
def created_rounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launches]:
    """A bundle that simulated engine processes created and proved, and their launches."""
    work, launches = tmp_path_factory.mktemp("rounds"), Launches()
    return offline.make(work, launches), launches


@pytest.fixture(scope="session")
def rounds_bundle(created_rounds: tuple[Path, Launches]) -> Path:
    """The directory of that bundle."""
    return created_rounds[0]
