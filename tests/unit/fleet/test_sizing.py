"""Algorithm 1 as corrected: cases by hand, and against every choice of servers."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from support.fleet_oracles import cluster, exhaustive, ledger_run

from coldstart.fleet import sizing
from coldstart.fleet.groups import Deployment
from coldstart.fleet.reservations import BandwidthReservations, NetworkLink
from coldstart.fleet.roster import Roster
from coldstart.fleet.sizing import Offer, choose
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, Overlap, ServerSpec

TERMS = Costs(
    container_s=2.0, context_s=1.0, library_s=3.0, join_s=0.25, hop_s=0.5, prefill_s=4.0, decode_s=0.1
)


@pytest.mark.parametrize(
    ("overlap", "fetch", "load", "seconds"),
    [
        (Overlap.SEQUENTIAL, 10.0, 50.0, 6.0 + 10.0 + 2.0),
        (Overlap.FULL, 10.0, 50.0, 10.0),
        (Overlap.FULL, 100.0, 50.0, 6.0),
        (Overlap.FULL, 100.0, 10.0, 2.0 + 1.0 + 10.0),
    ],
)
def test_a_rank_of_100_bytes(overlap: Overlap, fetch: float, load: float, seconds: float) -> None:
    assert sizing.predict_loaded_s(replace(TERMS, overlap=overlap), 100, fetch, load) == seconds


COSTS = Costs(container_s=2.0, context_s=1.0, library_s=3.0, prefill_s=1.0, decode_s=0.05)
SETTINGS = FleetSettings()
FAST = [Offer(f"s{n}", 2.0, 10.0, 100) for n in range(4)]


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_of_servers_does_better(seed: int) -> None:
    random = Random(seed)
    for _ in range(60):
        model, offers, settings, required, waited_s = cluster(random)
        found = choose(model, offers, settings, required=required, waited_s=waited_s)
        wanted = exhaustive(model, offers, settings, required, waited_s)
        got = None if found is None else (len(found.places), found.full, found.ttft_s, found.meets)
        if wanted is None or got is None:
            assert got is None and wanted is None
        else:
            assert got == (*wanted[:2], pytest.approx(wanted[2], rel=1e-12), wanted[3])


def test_size_is_two_ranks_with_one_full_when_one_is_too_slow() -> None:
    found = choose(FleetModel("m", 40, 60, COSTS, ttft_s=20.0), FAST, SETTINGS)
    assert found is not None
    assert [(place.size, place.memory, place.full) for place in found.places] == [
        (20, 60, True),
        (20, 30, False),
    ]
    assert found.ttft_s == 10.0 + 1.0 * (2 - 1 + 1 / 2)


def test_pipeline_is_not_chosen_when_its_ranks_cannot_start_or_start_more_slowly() -> None:
    """One worker takes 20 s for its bytes, two ranks 10 s; ranks that compile for 12 s answer later than one worker."""
    model = FleetModel("m", 40, 60, COSTS, ttft_s=20.0, recorded={1: 0.5, 2: 1.0})
    found = choose(model, FAST, SETTINGS)
    assert found is not None and (len(found.places), found.ttft_s) == (2, 12.5)
    assert "worker responds after 21.5 s, a pipeline of 2 ranks after 12.5 s" in found.reason
    slow = replace(model, recorded={1: 0.5, 2: 12.0}, unavailable={3: "no bundle", 4: "no bundle"})
    found = choose(slow, FAST, SETTINGS)
    assert found is not None and (len(found.places), found.meets) == (1, False)
    assert found.reason.endswith(
        "first token 21.5 s at best, limit 20 s; 3 ranks: no bundle; 4 ranks: no bundle"
    )
    # A burst needs two workers: as a pipeline they would answer after 23.5 s, one by one after 21.5 s.
    burst = choose(replace(slow, ttft_s=inf), FAST, SETTINGS, required=2)
    assert burst is not None and len(burst.places) == 1
    # What the fleet has measured replaces what the bundle records.
    found = choose(replace(slow, joins={2: 1.0}), FAST, SETTINGS)
    assert found is not None and len(found.places) == 2


def test_hop_of_a_pipeline_is_that_of_its_servers() -> None:
    hops = {("s0", "s1"): 0.5, ("s1", "s2"): 0.1}
    model = FleetModel("m", 40, 60, replace(COSTS, hop_s=0.2), ttft_s=20.0)
    for names, hop_s in (("s0", "s1"), 0.5), (("s1", "s2"), 0.1), (("s0", "s2"), 0.2):
        found = choose(model, [offer for offer in FAST if offer.server in names], SETTINGS, hops=hops)
        assert found is not None and len(found.places) == 2
        assert found.tpot_s == pytest.approx(0.05 * 1.5 + hop_s * 2)


@pytest.mark.parametrize("seed", range(10))
def test_offers_of_the_index_lead_to_the_choice_among_all_servers(seed: int) -> None:
    random = Random(seed)
    twice, roster = random.choice([0.0, 1.0]), Roster(FleetSettings())
    for number in range(30):
        link = random.choice([2.0, 4.0]), random.choice([20.0, 30.0])
        roster.join(ServerSpec(f"s{number}", random.choice([60, 90]), *link, random.randint(1, 3)), 0.0)
    now, chosen = 0.0, 0
    for number in range(60):
        now += random.uniform(0, 3)
        size = random.randint(10, 50)
        limits = random.choice([8.0, 14.0, inf]), random.choice([0.08, 0.2, inf])
        model = FleetModel(f"m{number}", size, size + 9, COSTS, *limits, held_twice=twice)
        avoided = frozenset(random.sample(list(roster.servers), random.randint(0, 3)))
        everything = [server.offer(now) for server in roster.open(avoided)]
        required = random.choice([1, 1, 2, 5])
        expected = choose(model, everything, roster.settings, required=required)
        assert roster.place(model, required, now, 0.0, avoided) == expected
        if expected is not None:
            chosen += 1
            group, _ = roster.launch(Deployment(model, 1.0), expected, required, now)
            for worker in group.workers:
                if random.random() < 0.7:
                    roster.record_fetched(worker, now)
        if random.random() < 0.3 and roster.workers:
            roster.remove_worker(roster.workers[random.choice(list(roster.workers))], now)
        if random.random() < 0.1:
            roster.drain(random.choice(list(roster.servers)))
        assert roster.find_most_free() == max(max(server.free) for server in roster.open())
    assert chosen > 20


def test_admitted_fetches_meet_deadlines_and_bytes_add_up() -> None:
    admitted = refused = 0
    for seed in range(400):
        yes, no, slack, error = ledger_run(Random(seed))
        admitted, refused = admitted + yes, refused + no
        # The clock's last bits.
        assert slack > -1e-6 and error < 1e-9
    assert admitted > 800 and refused > 400


def test_background_takes_what_is_left_and_does_not_count() -> None:
    reservations = BandwidthReservations(10.0)
    reservations.trail("rest", 100, 0.0)
    assert reservations.offer(0.0) == 10.0
    reservations.claim("a", 50, 5.0, 0.0)
    reservations.link.advance(5.0)
    assert reservations.link.background == {"rest": 100.0}
    assert reservations.link.advance(15.0) == [("rest", 15.0)]


def test_a_rest_below_the_resolution_of_the_clock_ends_at_once() -> None:
    """A simulator would repeat a timer that is due without end."""
    link = NetworkLink(2e9, 35_000.0, pending={"a": 5e-3})
    assert link.next_end() == link.now
    assert link.advance(link.now) == [("a", link.now)]


def test_a_name_fetches_once() -> None:
    link = NetworkLink(1.0)
    link.add("a", 1)
    with pytest.raises(ValueError, match="already"):
        link.add("a", 1, background=True)
