"""Engines are taken off their devices and put back: real helper processes over a double of the CUDA driver."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from pathlib import Path

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.system.devices import parker, parking
from coldstart.system.devices.parking import CHECKPOINTED, RUNNING, Parking, ParkingError

Park = Callable[[Sequence[int]], Parking]
STEPS = ("lock", "checkpoint", "restore", "unlock")


class Device:
    """State of two processes that use a device, as the double of the driver keeps it below `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.processes: list[subprocess.Popen[bytes]] = []
        self.renew()

    def renew(self) -> None:
        """Start processes in place of those that were killed, and let all of them run."""
        for process in self.processes:
            process.kill()
            process.communicate()
        self.processes = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
        for pid in self.pids:
            (self.place / str(pid)).write_text(str(RUNNING))
        self.plan()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def plan(self, order: Sequence[int] = (), fail: str = "") -> None:
        """Forget the calls so far; the next calls take effect in the order of these PIDs, and one of them fails."""
        (self.place / "calls").write_text("")
        (self.place / "order").write_text(" ".join(map(str, order)))
        (self.place / "fail").write_text(fail)

    def calls(self) -> list[tuple[str, int]]:
        """Return the step and the PID of each call since `plan`."""
        lines = (line.split() for line in (self.place / "calls").read_text().splitlines())
        return [(step, int(pid)) for step, pid in lines]

    def states(self) -> list[int]:
        """Return the state of each process."""
        return [int((self.place / str(pid)).read_text()) for pid in self.pids]


@pytest.fixture
def device(checkpoints: Path) -> Iterator[Device]:
    found = Device(checkpoints)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


@pytest.fixture
def park(device: Device) -> Iterator[Callable[[Sequence[int]], Parking]]:
    """Return a function that makes a Parking, whose helper ends with the test."""
    made: list[Parking] = []

    def create(pids: Sequence[int]) -> Parking:
        made.append(Parking(pids))
        return made[-1]

    yield create
    for one in made:
        one.close()


def test_two_engines_are_parked_and_restored_in_every_interleaving_of_their_calls(
    device: Device, park: Park
) -> None:
    first, second = device.pids
    engines = [park([first]), park([second])]

    def cycle(engine: Parking) -> tuple[str | None, str | None]:
        return engine.park(), engine.unpark()

    orders = list(combinations(range(8), 4))
    assert len(orders) == 70
    with ThreadPoolExecutor(2) as pool:
        for chosen in orders:
            order = [first if place in chosen else second for place in range(8)]
            device.plan(order)
            assert list(pool.map(cycle, engines)) == [(None, None)] * 2
            assert [pid for _, pid in device.calls()] == order
            assert [step for step, pid in device.calls() if pid == first] == list(STEPS)
            assert device.states() == [RUNNING] * 2


def test_all_ranks_take_a_step_before_one_takes_the_next_in_every_order(device: Device, park: Park) -> None:
    engine = park(device.pids)
    for pairs in product((device.pids, device.pids[::-1]), repeat=4):
        device.plan([pid for pair in pairs for pid in pair])
        assert engine.park() is None and device.states() == [CHECKPOINTED] * 2
        assert engine.unpark() is None and device.states() == [RUNNING] * 2
        assert device.calls() == [
            (step, pid) for step, pair in zip(STEPS, pairs, strict=True) for pid in pair
        ]


@pytest.mark.parametrize("how", ["error", "before", "after"])
def test_every_call_that_fails_or_kills_the_helper_is_undone_and_the_next_attempt_succeeds(
    device: Device, park: Park, how: str
) -> None:
    engine = park(device.pids)
    for number in range(8):
        device.plan(fail=f"{number} {how}")
        failed = engine.park()
        if number < 4:
            assert failed is not None and failed.startswith(STEPS[number // 2])
            assert device.states() == [RUNNING] * 2
            device.plan()
            assert engine.park() is None
        assert device.states() == [CHECKPOINTED] * 2
        failed = engine.unpark()
        if number >= 4:
            assert failed is not None and failed.startswith(STEPS[number // 2])
            assert device.states() == [CHECKPOINTED] * 2
            device.plan()
            assert engine.unpark() is None
        assert device.states() == [RUNNING] * 2


def test_engine_whose_rank_dies_during_a_call_is_reported_as_lost(device: Device, park: Park) -> None:
    for number in range(8):
        device.renew()
        device.plan(fail=f"{number} other")
        engine = park(device.pids)
        with pytest.raises(ParkingError, match="CUDA_ERROR_INVALID_VALUE"):
            assert engine.park() is None
            engine.unpark()
            pytest.fail("the rank did not die")
        engine.close()


def test_helper_that_was_killed_between_two_operations_is_replaced(device: Device, park: Park) -> None:
    engine = park(device.pids)
    for operation, state in ((engine.park, CHECKPOINTED), (engine.unpark, RUNNING)) * 2:
        assert operation() is None and device.states() == [state] * 2
        helper = engine._helper
        assert helper is not None
        os.kill(helper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)


def test_driver_that_does_not_answer_is_given_up_and_undone(
    device: Device, park: Park, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = device.pids
    engine = park(device.pids)
    assert engine.park() is None and engine.unpark() is None
    # The second process never gets its turn, and the first is unlocked in its place.
    device.plan(order=[first, first])
    monkeypatch.setattr(parking, "_STEP_S", 1.0)
    assert engine.park() == "lock failed: the driver did not respond within 1 s"
    assert device.calls() == [("lock", first), ("unlock", first)] and device.states() == [RUNNING] * 2


def test_machine_without_the_driver_is_a_reason_and_no_error(
    park: Park, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    reason = park(device.pids).park()
    assert reason is not None and parker.LIBRARY in reason and device.states() == [RUNNING] * 2


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "none responds"),
        ("550.54.14", "this driver is 550.54.14"),
        ("570.00", None),
        ("580.65.06", None),
    ],
)
def test_old_drivers_are_refused_with_a_reason_and_a_hint(version: str | None, expected: str | None) -> None:
    limit = parking.find_limit(version)
    assert (limit is None) == (expected is None)
    assert limit is None or (expected is not None and expected in limit[0] and limit[1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--tensor-parallel-size", "2"], None),
        (["--nnodes", "2"], "--nnodes is 2"),
        (["--data-parallel-size", "2"], "--data-parallel-size is 2"),
        (["--distributed-executor-backend", "ray"], "Ray"),
        (["--distributed-executor-backend", "mp"], None),
    ],
)
def test_engines_on_several_hosts_are_refused(given: list[str], expected: str | None) -> None:
    limit = parking.find_engine_limit(Arguments(given))
    assert (limit is None) == (expected is None)
    assert limit is None or (expected is not None and expected in limit[0])
