"""The ledger's equations, honesty, and the choice among those who wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling import IterationProfile, Job, SchedulerSettings
from coldstart.scheduling.express.index import Pressure, size
from coldstart.scheduling.express.ledger import CREDIT, LEAST, Honesty, PriceLedger
from coldstart.scheduling.express.policy import Express, Pass, kind_of

PROFILE = IterationProfile.from_points([(1, 0.01), (1001, 0.11)], [(1, 0.01), (64, 0.01)])


def taught(outputs: list[int], kind: object = None, **settings: object) -> Express:
    policy = Express(PROFILE, SchedulerSettings("express", **{"margin": 2.0, **settings}))  # type: ignore[arg-type]
    for number, tokens in enumerate(outputs):
        job = Job(f"taught-{number}", 0.0, 100, kind=kind)  # type: ignore[arg-type]
        policy.add(job, 0.0)
        policy.inside(job.id)
        job.generated = tokens
        policy.remove(job)
    policy.learn(Pressure(16, prompt=100.0), ())
    return policy


HEAVY = [15] * 9 + [900]


def test_the_price_is_earned_and_what_the_lane_takes_is_paid() -> None:
    ledger = PriceLedger(0.1)
    ledger.passed(1.0, 0.0, 0.0)
    assert ledger.balance == pytest.approx(0.1)
    ledger.passed(1.0, 0.5, 0.2)
    assert ledger.balance == pytest.approx(0.1 + 0.1 - 0.5 * 0.8 - 0.2)
    assert not ledger.open and PriceLedger(0.0).open is False


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 1)), max_size=200))
def test_the_lane_never_takes_more_than_the_price_and_its_credit(
    steps: list[tuple[float, float, float]],
) -> None:
    ledger, longest, most = PriceLedger(0.1), 0.0, 0.0
    for seconds, share, prefill in steps:
        taken = share if ledger.open else 0.0
        ledger.passed(seconds, taken, prefill * seconds * (taken > 0))
        longest, most = max(longest, seconds), max(most, seconds)
        assert ledger.balance <= CREDIT * 0.1 * longest + 1e-9
        assert ledger.taken_s <= 0.1 * ledger.crowded_s + CREDIT * 0.1 * longest + most + 1e-9


def test_forecasts_that_do_not_come_true_close_the_lane() -> None:
    honesty = Honesty()
    assert honesty.share == 1.0
    for _ in range(100):
        honesty.judged(0.9, ended=False)
    assert honesty.share == LEAST
    for _ in range(100):
        honesty.judged(0.9, ended=True)
    assert honesty.share == 1.0


def test_nobody_passes_before_enough_was_seen_or_where_lengths_are_alike() -> None:
    few, alike = taught(HEAVY * 3), taught([100] * 1000)
    for policy in (few, alike):
        policy.add(Job("a", 0.0, 100), 0.0)
        assert not policy.asking()


def test_the_newest_of_the_best_passes_first() -> None:
    policy = taught(HEAVY * 50)
    for name, prompt in (("long", 2000), ("old", 100), ("new", 100)):
        policy.add(Job(name, 0.0, prompt), 0.0)
    tried = Job("tried", 0.0, 100, generated=100)
    policy.add(tried, 0.0)
    assert policy.asking()
    assert [job.id for job, _ in policy.waiting.best(0.0, 2)] == ["new", "old"]
    policy.inside("new")
    assert policy.waiting.best(policy.threshold, 1)[0][0].id == "old"
    assert "tried" not in [job.id for job, _ in policy.waiting.best(policy.threshold, 99)]


def test_iterating_yields_the_order_of_arrival() -> None:
    policy = Express(PROFILE)
    jobs = [Job(name, 0.0, 10) for name in "bac"]
    for job in jobs:
        policy.add(job, 0.0)
    assert [job.id for job in policy] == ["b", "a", "c"] and len(policy) == 3
    with pytest.raises(ValueError, match="already"):
        policy.add(jobs[0], 0.0)
    policy.remove(jobs[1])
    assert [job.id for job in policy] == ["b", "c"] and policy.number("c") == 3


def test_a_hint_makes_a_class_of_its_octave() -> None:
    assert kind_of(Job("a", 0, 1)) is None
    assert kind_of(Job("a", 0, 1, kind="adapter")) == "adapter"
    same = {kind_of(Job("a", 0, 1, kind="x", expected=tokens)) for tokens in (64, 100, 127)}
    assert len(same) == 1 and kind_of(Job("a", 0, 1, kind="y", expected=100)) not in same


def test_a_class_that_lies_loses_its_place() -> None:
    policy = taught(HEAVY * 50, kind="liar")
    policy.add(Job("a", 0.0, 100, kind="liar"), 0.0)
    assert policy.asking()
    for _ in range(60):
        policy.judged(Pass("liar", 20, 0.9), ended=False)
    policy.ledger.honesty = Honesty()
    assert not policy.asking()


def test_a_class_that_is_not_believed_is_again_as_more_of_it_end() -> None:
    policy = taught(HEAVY * 50, kind="wrong")
    for _ in range(60):
        policy.judged(Pass("wrong", 20, 0.9), ended=False)
    policy.ledger.honesty = Honesty()
    policy.add(Job("a", 0.0, 100, kind="wrong"), 0.0)
    assert not policy.asking()
    for number in range(300):
        job = Job(f"more-{number}", 0.0, 100, generated=HEAVY[number % 10], kind="wrong")
        policy.add(job, 0.0)
        policy.remove(job)
    assert policy.asking()


def test_the_threshold_falls_only_with_hints_and_saved_credit_and_never_rises() -> None:
    policy = taught(HEAVY * 50)
    usual = policy.margin * policy.index.base
    policy.add(Job("no hint", 0.0, 100), 0.0)
    policy.ledger.passed(1.0, 0.0, 0.0)
    assert policy.ledger.saved > 0 and policy.threshold == usual
    for number in range(20):
        policy.add(Job(f"long-{number}", 0.0, 100, expected=900), 0.0)
    fell = policy.threshold
    assert fell < usual
    for _ in range(round(CREDIT)):
        policy.ledger.passed(1.0, 0.0, 0.0)
    assert policy.ledger.saved == pytest.approx(1.0)
    assert policy.threshold < fell and policy.threshold == pytest.approx(
        policy.margin * (policy.waiting.earning() or 0)
    )
    for number in range(20):
        policy.inside(f"long-{number}")
        policy.add(Job(f"short-{number}", 0.0, 100, expected=2), 0.0)
    assert policy.threshold == usual


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 2000), st.booleans()), max_size=120))
def test_what_the_waiting_earn_is_kept_up_to_date(changes: list[tuple[int, int, bool]]) -> None:
    policy = taught(HEAVY * 50)
    waiting = policy.waiting
    for number, (name, expected, learns) in enumerate(changes):
        if str(name) in waiting:
            waiting.discard(str(name))
        else:
            policy.outside(Job(str(name), 0.0, 10 + expected % 90, expected=expected), 50)
        if learns:
            policy.learn(Pressure(1 + number, prompt=100.0), ())
    worths = [policy.index.worth(standing) for standing in waiting._where.values()]
    if worths:
        by_hand = sum(worth.value for worth in worths) / sum(worth.cost for worth in worths)
        assert waiting.earning() == pytest.approx(by_hand)
    else:
        assert waiting.earning() is None


def test_an_aborted_request_does_not_count_as_short() -> None:
    policy = taught([500] * 200)
    before = policy.index.table(None).mean
    for number in range(200):
        job = Job(str(number), 0.0, 100, generated=2)
        policy.add(job, 0.0)
        policy.gone(job, cut=True)
    policy.learn(Pressure(16, prompt=100.0), ())
    assert policy.index.table(None).mean == pytest.approx(before, rel=0.2)
    assert size(100) == size(110)
