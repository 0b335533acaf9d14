"""Deadlines: their unit and rounding, the bound on how long a request can be passed, and the order of clients' priorities."""

import heapq

from hypothesis import example, given
from hypothesis import strategies as st

from coldstart.scheduling.deadline import MAX_CLIENT_PRIORITY, Deadlines
from coldstart.scheduling.profile import IterationProfile

PROFILE = IterationProfile.create([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01)])
NOW = 1_800_000_000.0


def test_slo_limits_the_slack_to_what_leaves_time_for_the_prefill() -> None:
    deadlines = Deadlines(PROFILE, factor=32, slo_s=0.3)
    assert deadlines.slack_s(1000) == 0.3 - 0.2 and deadlines.slack_s(10**6) == 0.0
    assert deadlines.slack_s(1) == 0.3 - 0.01 and Deadlines(PROFILE, 32).slack_s(1) == 0.32


@given(st.integers(-(1 << 70), 1 << 70), st.integers(-(1 << 70), 1 << 70), st.integers(0, 4000))
def test_a_clients_own_priority_wins_over_any_deadline(one: int, other: int, tokens: int) -> None:
    deadlines = Deadlines(PROFILE, 1e9)
    late, early = deadlines.priority(NOW, range(tokens), one), deadlines.priority(0.0, (), other)
    assert -(1 << 63) <= early <= late or one < other or abs(one) > MAX_CLIENT_PRIORITY < abs(other)
    assert late < 1 << 63
    if max(abs(one), abs(other)) <= MAX_CLIENT_PRIORITY and one != other:
        assert (late < early) == (one < other)


REQUESTS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 3000), st.floats(0.001, 5)), min_size=1, max_size=40
)


@given(REQUESTS, st.floats(0, 64), st.one_of(st.none(), st.floats(0.01, 5)))
@example([(0.0, 3000, 1.0), (0.5, 1, 1.0), (0.1, 1, 1.0)], 0.0, None)
def test_only_requests_within_the_slack_pass_an_earlier_one(
    requests: list[tuple[float, int, float]], factor: float, slo_s: float | None
) -> None:
    """One server that never preempts takes the request of smallest (priority, arrival), as vLLM's queue does."""
    deadlines, now, arrivals = Deadlines(PROFILE, factor, slo_s), NOW, []
    for number, (gap, tokens, service) in enumerate(requests):
        now += gap
        arrivals.append((now, number, tokens, service))
    queue: list[tuple[int, float, int]] = []
    order, clock, later = [], NOW, list(arrivals)
    while later or queue:
        clock = max(clock, later[0][0]) if not queue else clock
        while later and later[0][0] <= clock:
            arrival, number, tokens, _ = later.pop(0)
            heapq.heappush(queue, (deadlines.priority(arrival, range(tokens)), arrival, number))
        number = heapq.heappop(queue)[2]
        order.append(number)
        clock += arrivals[number][3]
    for place, number in enumerate(order):
        arrival, _, tokens, _ = arrivals[number]
        for passing in order[:place]:
            # One microsecond for rounding.
            assert arrivals[passing][0] <= arrival + deadlines.slack_s(tokens) + 2e-6
