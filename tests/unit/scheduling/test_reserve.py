"""Blocks reserved for bursts."""

from coldstart.scheduling.reserve import ArrivalReserve


def test_the_reserve_follows_recent_bursts_and_forgets_them() -> None:
    reserve = ArrivalReserve(window_s=1.0, quantile=1.0, history=4)
    assert reserve.blocks(0.0) == 0
    reserve.add_arrival(5, 0.1)
    reserve.add_arrival(7, 0.9)
    assert reserve.blocks(1.5) == 12
    assert reserve.blocks(9.0) == 0
