"""Settings of a quick run."""

import pytest

from coldstart.bench.measure import RunSettings


@pytest.fixture
def settings() -> RunSettings:
    return RunSettings(prompts=("a", "b c"), max_tokens=4, ready_timeout_s=20.0, measure_steady_state=False)
