"""Deadlines of bandwidth reservations under exact processor sharing, and bytes of the link."""

from random import Random

import pytest
from support.fleet_oracles import ledger_run

from coldstart.fleet.reservations import BandwidthReservations, NetworkLink


def test_admitted_fetches_meet_deadlines_and_bytes_add_up() -> None:
    admitted = refused = 0
    for seed in range(400):
        yes, no, slack, error = ledger_run(Random(seed))
        admitted, refused = admitted + yes, refused + no
        # The clock's last bits.
        assert slack > -1e-6 and error < 1e-9
    assert admitted > 800 and refused > 400


def test_shares_are_right_across_a_departure() -> None:
    """b ends at 10, then a has the full rate: 50 + 100 bytes by 20, while equation 4 gives 100."""
    link = NetworkLink(10.0)
    link.add("a", 200)
    link.add("b", 50)
    assert link.advance(20.0) == [("b", 10.0)]
    assert link.pending == {"a": 50.0} and link.moved == 200.0
    assert link.next_end() == 25.0


def test_background_takes_what_is_left_and_does_not_count() -> None:
    reservations = BandwidthReservations(10.0)
    reservations.trail("rest", 100, 0.0)
    assert reservations.offer(0.0) == 10.0
    reservations.claim("a", 50, 5.0, 0.0)
    reservations.link.advance(5.0)
    assert reservations.link.background == {"rest": 100.0}
    assert reservations.link.advance(15.0) == [("rest", 15.0)]


def test_a_name_fetches_once() -> None:
    link = NetworkLink(1.0)
    link.add("a", 1)
    with pytest.raises(ValueError, match="already"):
        link.add("a", 1, background=True)
