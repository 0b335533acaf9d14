"""A bundle made once for all tests that only read it."""

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
def rounds_made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launches]:
    """A bundle that simulated engine processes have made and proven, and what they said."""
    work, launches = tmp_path_factory.mktemp("rounds"), Launches()
    return offline.make(work, launches), launches


@pytest.fixture(scope="session")
def rounds_bundle(rounds_made: tuple[Path, Launches]) -> Path:
    """The directory of that bundle."""
    return rounds_made[0]
