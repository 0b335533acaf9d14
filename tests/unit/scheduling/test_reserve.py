"""Blocks reserved for bursts."""

from coldstart.scheduling.reserve import ArrivalReserve


def test_the_reserve_follows_recent_bursts_and_forgets_them() -> None:
    reserve = ArrivalReserve(window_s=1.0, quantile=1.0, history=4)
    assert reserve.blocks(0.0) == 0
    reserve.add_arrival(5, 0.1)
    reserve.add_arrival(7, 0.9)
    assert reserve.blocks(1.05) == 12
    assert reserve.blocks(9.0) == 0


def test_the_window_follows_the_measured_time_of_a_load() -> None:
    reserve = ArrivalReserve(window_s=1.0, quantile=0.5, history=100)
    for second in range(10):
        reserve.add_arrival(3, float(second))
    assert reserve.blocks(10.0) == 3
    for _ in range(50):
        reserve.add_latency(0.1)
    assert 0.1 < reserve.window_s < 0.11
    assert reserve.blocks(11.0) == 0, "most windows of a tenth of a second are empty"
