"""States of one model: every transition of the table is possible and no other one is."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.host.events import Failure
from coldstart.host.model_state import IllegalTransitionError, Model
from coldstart.host.specification import ModelSpec, Tier, stopped

ASLEEP = Tier("asleep-1", 2, 1.0, host_memory=10)
SPEC = ModelSpec("m", (Tier("awake", 10, 0.0), ASLEEP, stopped(8.0)))


def test_failures_double_the_wait_up_to_a_limit_and_a_start_forgets_them() -> None:
    model, now = Model(SPEC), 0.0
    for waits in (1.0, 2.0, 4.0, 5.0, 5.0):
        model.start(now)
        model.fail(Failure("no"), now, 1.0, 5.0)
        assert model.retry_at == now + waits
        with pytest.raises(IllegalTransitionError, match="may not start before"):
            model.start(now)
        now = model.retry_at
    model.start(now)
    model.ready(now + 1, 1.0, None)
    assert (model.failures, model.error, model.retry_at) == (0, "", 0.0)


@pytest.mark.parametrize(
    "tiers",
    [
        (Tier("awake", 10, 0.0),),
        (Tier("awake", 10, 0.0), Tier("asleep-1", 11, 1.0), stopped(2.0)),
        (Tier("awake", 10, 0.0), Tier("asleep-1", 1, 3.0), stopped(2.0)),
        (Tier("awake", 0, 0.0), stopped(2.0)),
        (stopped(2.0), Tier("awake", 10, 0.0)),
    ],
)
def test_invalid_tiers_are_refused(tiers: tuple[Tier, ...]) -> None:
    with pytest.raises(UsageError, match=r"models\.m\.tiers"):
        ModelSpec("m", tiers)
