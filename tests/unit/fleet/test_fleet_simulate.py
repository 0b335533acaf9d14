"""The simulated fleet: starts with hand-computed times, and invariants of any replay."""

from collections.abc import Callable
from math import inf
from random import Random

import pytest
from support.fleet_rig import Recording, record_decisions

from benchmarks.fleet.baselines import Cached, FirstFit, Locality
from coldstart.fleet import events
from coldstart.fleet.core import FleetCore
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, Overlap, ServerSpec
from coldstart.lab.fleet import simulate
from coldstart.lab.records import SimulatedRequest

COSTS = Costs(2.0, 1.0, 2.0, 0.25, 0.0, 1.0, 0.5)
SERVERS = [ServerSpec(f"s{n}", 60, 4.0, 20.0) for n in range(2)]
SETTINGS, HOST_MEMORY = FleetSettings(), {f"s{n}": 120 for n in range(5)}
MODEL = FleetModel("m", 40, 50, COSTS, ttft_s=9.0, idle_s=60.0)


def one(arrival_s: float = 0.0, tokens: int = 101, model: str = "m") -> SimulatedRequest:
    return SimulatedRequest(arrival_s, model, 1.0, 0.5, tokens)


def test_a_pipeline_by_hand() -> None:
    """Two ranks of 20 bytes: up at max(5, 5) + 0.5, first token 1.5 s later; one is whole 20/4 + 20/20 s after that it began.

    Tokens then take 0.5 * 1.5 s: six are out when the stream moves at 11.5; it goes on at 11.84 with 0.5 s each.
    """
    done = simulate([one()], SERVERS, [MODEL], FleetSettings())
    (served,) = done.records
    assert (served.first_token_s, served.cold) == (7.0, True)
    assert served.finished_s == pytest.approx(11.84 + (100 - 4.5 / 0.75) * 0.5)
    names = ("starts", "workers", "groups_by_ranks", "fetched_bytes", "streams_moved")
    assert [done.counts[name] for name in names] == [1, 2, {"2": 1}, 60.0, 1]
    assert done.limits == {"m": {"ttft_s": 9.0}}


@pytest.mark.parametrize(("overlap", "first"), [(Overlap.FULL, 11.25), (Overlap.SEQUENTIAL, 18.25)])
def test_each_way_of_starting(overlap: Overlap, first: float) -> None:
    """40 bytes: 10 s from the network, 2 s to the device, 5 s of runtime."""
    costs = Costs(2.0, 1.0, 2.0, 0.25, 0.0, 1.0, 0.5, overlap)
    model = FleetModel("m", 40, 50, costs)
    (served,) = simulate([one()], SERVERS, [model], FleetSettings()).records
    assert served.first_token_s == first


def test_a_rank_that_dies_costs_time_and_no_request() -> None:
    fault = [(8.0, events.WorkerEnded("m#1.1", "killed"))]
    done = simulate([one()], SERVERS, [MODEL], FleetSettings(), faults=fault)
    (served,) = done.records
    assert (served.ok, served.first_token_s, done.counts["starts"]) == (True, 7.0, 2)
    assert 13.0 < (served.finished_s or 0.0) < inf


def recorded(record: Recording) -> Callable[..., FleetCore]:
    """Return a factory of cores whose decisions are appended to `record`."""
    return lambda *given: record_decisions(FleetCore(*given), record.append)


def load(seed: int) -> tuple[list[SimulatedRequest], list[ServerSpec], list[FleetModel]]:
    random, now, asked = Random(seed), 0.0, list[SimulatedRequest]()
    servers = [
        ServerSpec(f"s{n}", 60, random.choice([2.0, 8.0]), 20.0, random.randint(1, 3)) for n in range(5)
    ]
    models = [
        FleetModel(f"m{n}", 20 + n, 30 + n, COSTS, random.choice([8.0, 15.0, inf]), batch=3, idle_s=10.0)
        for n in range(12)
    ]
    for _ in range(300):
        now += random.expovariate(0.8)
        asked.append(one(now, random.randint(1, 60), f"m{min(11, int(random.expovariate(0.3)))}"))
    return asked, servers, models


@pytest.mark.parametrize("placement", ["pipeline", "cached", "first fit", "locality"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_every_reservation_is_met(seed: int, placement: str) -> None:
    asked, servers, models = load(seed)
    record: Recording = []
    rosters = {
        "pipeline": Roster(SETTINGS),
        "cached": Cached(SETTINGS, HOST_MEMORY),
        "first fit": FirstFit(SETTINGS),
        "locality": Locality(SETTINGS, HOST_MEMORY),
    }
    done = simulate(asked, servers, models, SETTINGS, roster=rosters[placement], core=recorded(record))
    for served in done.records:
        assert served.ok and served.first_token_s and served.finished_s
        assert served.due_s < served.first_token_s <= served.finished_s < inf
    promised = {
        a.worker: a.deadline for _, _, actions in record for a in actions if isinstance(a, events.LaunchRank)
    }
    ended = {event.worker: time for time, event, _ in record if isinstance(event, events.WeightsFetched)}
    assert [worker for worker, time in ended.items() if time > promised[worker] + 1e-6] == []
    if placement in ("pipeline", "cached"):
        assert sum(deadline < inf for deadline in promised.values()) > 10 and done.counts["streams_moved"]
