"""Launchers of a fake server process."""

from collections.abc import Callable

import pytest
from support.fake_launcher import FakeLauncher

from coldstart.bench.measure import RunSettings


@pytest.fixture
def fake() -> Callable[..., FakeLauncher]:
    return FakeLauncher


@pytest.fixture
def settings() -> RunSettings:
    return RunSettings(prompts=("a", "b c"), max_tokens=4, ready_timeout_s=20.0, measure_steady_state=False)
