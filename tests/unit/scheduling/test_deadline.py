"""Deadlines: their unit and rounding, the bound on how long a request can be passed, and the order of clients' priorities."""

import heapq
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coldstart.errors import UsageError
from coldstart.scheduling.classes import RequestClasses
from coldstart.scheduling.deadline import MAX_CLIENT_PRIORITY, DeadlinePolicy
from coldstart.scheduling.profile import Curve, IterationProfile, ProfileError
from coldstart.scheduling.profiling import IterationProfiler

PROFILE = IterationProfile.create([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01)])
NOW = 1_800_000_000.0


def test_slo_limits_the_slack_to_what_leaves_time_for_the_prefill() -> None:
    deadlines = DeadlinePolicy(PROFILE, factor=32, slo_s=0.3)
    assert deadlines.compute_slack_s(1000) == 0.3 - 0.2 and deadlines.compute_slack_s(10**6) == 0.0
    assert deadlines.compute_slack_s(1) == 0.3 - 0.01
    assert DeadlinePolicy(PROFILE, 32).compute_slack_s(1) == 0.32


@given(st.integers(-(1 << 70), 1 << 70), st.integers(-(1 << 70), 1 << 70), st.integers(0, 4000))
def test_a_clients_own_priority_wins_over_any_deadline(one: int, other: int, tokens: int) -> None:
    deadlines = DeadlinePolicy(PROFILE, 1e9)
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
    deadlines, now, arrivals = DeadlinePolicy(PROFILE, factor, slo_s), NOW, []
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
            assert arrivals[passing][0] <= arrival + deadlines.compute_slack_s(tokens) + 2e-6


KEY = "key-of-the-batch-clients"
FILE = """
[interactive]
priority = -10
header = "X-Class: interactive"
[batch]
priority = 10
key_file = "batch.key"
"""


def test_a_request_has_the_priority_of_the_first_class_that_fits(tmp_path: Path) -> None:
    (tmp_path / "batch.key").write_text(f"{KEY}\n")
    (tmp_path / "classes.toml").write_text(FILE)
    classes = RequestClasses(tmp_path / "classes.toml")
    by_key, by_header = (b"authorization", b"Bearer " + KEY.encode()), (b"x-class", b"interactive")
    assert classes.find_priority([(by_key[0], b"bearer" + by_key[1][6:]), (b"accept", b"*/*")]) == 10
    assert classes.find_priority([by_key, by_header]) == classes.find_priority([by_header]) == -10
    others = [(b"authorization", b"Bearer other"), (b"x-class", b"batch"), (b"x-other", b"interactive")]
    assert classes.find_priority(others) == classes.find_priority([]) == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no request class"),
        ("[a", "cannot read the request classes"),
        ("a = 1", "invalid request class a in .*: `priority` must be an integer"),
        ('[a]\npriority = 4000\nheader = "a: b"', "from -2047 to 2047"),
        ('[a]\npriority = true\nheader = "a: b"', "`priority` must be an integer"),
        ("[a]\npriority = 1", "expected `priority` and either `header` or `key_file`"),
        ('[a]\npriority = 1\nheader = "a: b"\nkey_file = "k"', "no other key"),
        ('[a]\npriority = 1\nheader = "no value"', 'form "NAME: VALUE"'),
        ('[a]\npriority = 1\nheaders = "a: b"', "expected `key_file`, or `header`"),
        ('[a]\npriority = 1\nkey_file = "missing"', "cannot read"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_the_class(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=reason) as failure:
        RequestClasses(file)
    assert failure.value.hint


POINTS = st.lists(
    st.tuples(st.integers(1, 4096), st.floats(1e-4, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@given(POINTS, st.floats(0, 8192), st.floats(0, 8192))
def test_a_curve_never_falls(points: list[tuple[int, float]], a: float, b: float) -> None:
    curve = Curve.from_points(points, "prefill")
    low, high = sorted((a, b))
    assert curve(low) <= curve(high) * (1 + 1e-9)


def test_a_mixed_iteration_costs_more_than_either_part() -> None:
    profile = IterationProfile.create([(1, 0.02), (512, 0.05)], [(1, 0.02), (16, 0.025)])
    mixed = profile.predict_iteration_s(512, 16)
    assert max(profile.predict_iteration_s(512, 0), profile.predict_iteration_s(0, 16)) < mixed < 0.075
    assert profile.predict_iteration_s(0, 0) == 0.0


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "Expected `object`"),
        ({"prefill": [[1, 1]]}, "field `decode`"),
        ({"prefill": [], "decode": [[1, 1]]}, "no points"),
        ({"prefill": [[1, 0]], "decode": [[1, 1]]}, "is zero or negative"),
        ({"prefill": [[1, 1], [1, 2]], "decode": [[1, 1]]}, "more than one time for the same size"),
        ({"prefill": [["a", 1]], "decode": [[1, 1]]}, "Expected `float`, got `str` - at `$.prefill[0][0]`"),
        ({"prefill": [[10**400, 1]], "decode": [[1, 1]]}, "Number out of range"),
    ],
)
def test_invalid_profile_is_refused_with_the_reason(document: object, words: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        IterationProfile.parse(document)


PREFILL = [1 << power for power in range(12)]
DECODE = [1 << power for power in range(7)]
SIZES = {"prefill": PREFILL, "decode": DECODE}


class Engine:
    """Fake engine: an iteration takes `floor_s` plus `token_s` per token, and a measurement costs `factor` times that."""

    def __init__(self, floor_s: float, token_s: float, factor: float = 1.0) -> None:
        self.floor_s, self.token_s, self.factor = floor_s, token_s, factor
        self.time, self.asked = 0.0, list[tuple[str, int]]()

    def measure(self, kind: str, size: int) -> float:
        self.asked.append((kind, size))
        seconds = self.floor_s + self.token_s * size
        self.time += seconds * self.factor
        return seconds

    def profile(self, budget_s: float) -> dict[str, object]:
        return IterationProfiler(self.measure, budget_s, now=lambda: self.time).run(SIZES)


@pytest.mark.parametrize("token_s", [0.01, 0.03, 0.3, 3.0])
def test_profile_stays_within_its_budget_and_lists_missing_sizes(token_s: float) -> None:
    engine = Engine(0.5, token_s, factor=2.0)
    found = engine.profile(120)
    assert engine.time <= 120 and found["seconds"] == round(engine.time, 3) and found["budget_s"] == 120
    measured = {kind: [size for size, _ in found[kind]] for kind in SIZES}  # type: ignore[attr-defined]
    left = found["left_out"]
    assert isinstance(left, dict) and left["prefill"][-1] == 2048
    for kind, sizes in SIZES.items():
        assert measured[kind] + left.get(kind, []) == sizes
    # What is left is still a profile, for bundles and schedulers.
    assert IterationProfile.parse(found).shortest_iteration_s == pytest.approx(0.5 + token_s)
