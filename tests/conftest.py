"""Fixtures that several rooms use. Being here also puts `tools` on the import path of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldstart.artifacts.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty bundle store."""
    return Store(tmp_path / "store")
