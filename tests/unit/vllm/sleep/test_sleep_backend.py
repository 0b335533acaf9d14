"""Sleep backend over both forms of a device: one copy of the weights, and the same weights after any order of calls."""

import ctypes
import itertools
import os
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_sleep_device import SIZE, Driver

from coldstart.graphs.errors import DriverError
from coldstart.vllm import sleep
from coldstart.vllm.sleep.memory import ArenaPool

torch = pytest.importorskip("torch")
backend = pytest.importorskip("coldstart.vllm.sleep.backend")
device = pytest.importorskip("coldstart.vllm.sleep.device")
pytestmark = pytest.mark.slow


class Engine:
    """A model of two layers and a buffer on a CPU device, and its backend. `seed` stands for a checkpoint."""

    def __init__(self, arenas: ArenaPool, seed: int) -> None:
        self.seed, self.loads, self.reads = seed, 0, 0
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).requires_grad_(False)
        self.model.register_buffer("scale", torch.full((4,), 0.5))
        self.device = device.MemoryFileWeights()
        self.load()
        self.device.move_tensors([*self.model.parameters(), *self.model.buffers()])
        self.backend, self.cache = backend.ColdstartBackend(arenas), torch.ones(1 << 16)
        self.backend.bind_model(self.model, f"model-{seed}", self.device, self.load, lambda: [self.cache])
        read = self.device.read

        def count(*arguments: Any) -> None:
            self.reads += 1
            read(*arguments)

        self.device.read = count

    def load(self) -> None:
        self.loads += 1
        random = torch.Generator().manual_seed(self.seed)
        for parameter in self.model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=random))

    def answer(self) -> list[float]:
        found: list[float] = (self.model(torch.ones(8))[:4] * self.model.scale).tolist()
        return found

    def reasons(self) -> list[str]:
        return [one.reason for one in self.backend.fallbacks]


@pytest.fixture
def arenas(tmp_path: Path) -> ArenaPool:
    return ArenaPool(tmp_path, 1 << 20)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("worker_extension_cls", "a.B"), ("sleep_mode_backend", "nixl"), ("sleep_mode_offload_cudagraph", True)],
)
def test_arguments_that_exclude_the_backend_are_named(argument: str, value: object) -> None:
    args = Namespace(**{"worker_extension_cls": "", "sleep_mode_backend": "cumem"} | {argument: value})
    fallback = sleep.choose_backend(args)
    assert fallback is not None and f"--{argument.replace('_', '-')}" in fallback.reason
    assert args.worker_extension_cls != sleep.EXTENSION


def test_level_1_copies_the_weights_once_and_wakes_them_alone(arenas: ArenaPool) -> None:
    engine = Engine(arenas, 1)
    before = engine.answer()
    for _ in range(5):
        engine.backend.suspend(1)
        assert engine.backend.state() == "SUSPENDED" and not any(
            map(engine.device.is_mapped, engine.device.regions())
        )
        assert not engine.cache[4096:-4096].any()
        engine.backend.resume(["kv_cache"])
        assert not any(map(engine.device.is_mapped, engine.device.regions()))
        engine.backend.resume(["weights"])
        assert engine.backend.state() == "RUNNING" and engine.answer() == before
    assert (engine.reads, engine.loads, engine.reasons()) == (len(engine.device.regions()), 1, [])


def test_changed_weights_are_copied_again_with_a_reason(arenas: ArenaPool) -> None:
    engine = Engine(arenas, 1)
    for _ in range(2):
        engine.backend.suspend(1)
        engine.backend.resume()
        engine.model[1].bias.fill_(3)
        changed = engine.answer()
    engine.backend.suspend(1)
    engine.backend.resume()
    assert engine.answer() == changed and len(list(arenas.directory.glob("*.json"))) == 1
    assert engine.reasons() == ["1.bias has changed since the last sleep; the weights were copied again"]


def test_evicted_weights_are_loaded_again_with_a_reason(tmp_path: Path) -> None:
    arenas = ArenaPool(tmp_path, 5 * device.PAGE)
    first, second = Engine(arenas, 1), Engine(arenas, 2)
    before = first.answer()
    first.backend.suspend(1)
    second.backend.suspend(1)
    first.backend.resume()
    assert first.answer() == before and (first.loads, second.loads) == (2, 1)
    (reason,) = first.reasons()
    assert "evicted: another model needed the memory" in reason and "for model-2" in reason
    second.backend.resume()
    assert second.reasons() == []


def test_fine_tune_with_the_shapes_of_its_base_never_gets_its_weights(arenas: ArenaPool) -> None:
    base, tuned = Engine(arenas, 1), Engine(arenas, 2)
    before = tuned.answer()
    for engine in (base, tuned):
        engine.backend.suspend(1)
    tuned.backend._arena, base.backend._arena = base.backend._arena, tuned.backend._arena
    tuned.backend.resume()
    assert tuned.answer() == before != base.seed and tuned.loads == 2
    assert tuned.reasons() == [
        "the copy of 0.weight does not match its digest; the weights were loaded again"
    ]


def test_level_2_drops_the_copy_and_keeps_buffers(arenas: ArenaPool) -> None:
    engine = Engine(arenas, 1)
    before = engine.answer()
    engine.backend.suspend(1)
    engine.backend.resume()
    engine.backend.suspend(2)
    assert not list(arenas.directory.glob("*.json"))
    engine.backend.resume(["weights"])
    assert not engine.model[0].weight.any() and engine.model.scale.tolist() == [0.5] * 4
    engine.load()
    engine.backend.resume(["kv_cache"])
    assert engine.answer() == before and engine.reasons() == []


def test_weights_without_room_are_loaded_again_until_a_load_succeeds(tmp_path: Path) -> None:
    engine = Engine(ArenaPool(tmp_path, 100), 1)
    before = engine.answer()
    engine.backend.suspend(1)
    load, engine.backend._reload = engine.backend._reload, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.backend.resume()
    engine.backend._reload = load
    engine.backend.resume()
    assert engine.answer() == before and engine.loads == 2
    assert "host memory" in engine.reasons()[0]


class Device:
    """A model of two tensors in the double of the driver, and its backend."""

    def __init__(self, arenas: ArenaPool) -> None:
        self.driver = Driver(2)
        self.pinned = self.driver.fake.fake_registered()
        self.tensors = [self._view(region.address) for region in self.driver.weights.regions()]
        self.model = torch.nn.Module()
        for number, tensor in enumerate(self.tensors):
            self.model.register_parameter(f"layer{number}", torch.nn.Parameter(tensor, requires_grad=False))
        self.load()
        self.backend = backend.ColdstartBackend(arenas)
        self.backend.bind_model(self.model, "model", self.driver.weights, self.load)
        self.driver.trail()

    @staticmethod
    def _view(address: int) -> Any:
        return torch.frombuffer((ctypes.c_char * SIZE).from_address(address), dtype=torch.int64)

    def load(self) -> None:
        for number, tensor in enumerate(self.tensors):
            torch.arange(number, number + len(tensor), out=tensor)

    def is_loaded(self) -> bool:
        return all(
            torch.equal(tensor, torch.arange(number, number + len(tensor)))
            for number, tensor in enumerate(self.tensors)
        )

    def close(self) -> None:
        """Free all memory, and check that nothing is left."""
        self.driver.fake.fake_fail_at(-1, 0)
        self.backend._drop()
        for region in self.driver.weights.regions():
            self.driver.weights.unmap(region)
        assert self.driver.live() == 0


def test_driver_calls_of_two_cycles_are_in_order(tmp_path: Path) -> None:
    found = Device(ArenaPool(tmp_path, 4 * SIZE))
    expected = {
        # The copy is complete before memory is unmapped, and the arena is filled once.
        ("suspend", 1): ["pin", "read", "read", "wait", *["unmap", "release"] * 2],
        ("resume", 1): [*["create", "map", "access"] * 2, "write", "write", "wait"],
        ("suspend", 2): ["unmap", "release"] * 2,
        ("resume", 2): [*["create", "map", "access"] * 2, "write", "write", "wait"],
    }
    for (name, _), calls in expected.items():
        getattr(found.backend, name)()
        assert found.driver.trail() == calls
    assert found.is_loaded()
    found.close()
    assert "unpin" in found.driver.trail()
    assert found.driver.fake.fake_registered() == found.pinned


def test_weights_that_cannot_be_pinned_are_copied_with_a_reason(tmp_path: Path) -> None:
    found = Device(ArenaPool(tmp_path, 4 * SIZE))
    found.driver.fake.fake_fail_at(1, 0)
    found.backend.suspend()
    found.backend.resume()
    (fallback,) = found.backend.fallbacks
    assert "not pinned" in fallback.reason and "cuMemHostRegister" in fallback.reason and found.is_loaded()
    found.close()
    assert "unpin" not in found.driver.trail()


OPERATIONS: dict[str, Callable[[Any], None]] = {
    "sleep 1": lambda one: one.suspend(1),
    "sleep 2": lambda one: one.suspend(2),
    "wake weights": lambda one: one.resume(["weights"]),
    "wake cache": lambda one: one.resume(["kv_cache"]),
}


@pytest.mark.parametrize("first", OPERATIONS)
def test_weights_are_the_same_after_any_order_of_calls(tmp_path: Path, first: str) -> None:
    arenas = ArenaPool(tmp_path, 4 * SIZE)
    for rest in itertools.product(OPERATIONS, repeat=3):
        found, level = Device(arenas), 0
        for name in (first, *rest):
            OPERATIONS[name](found.backend)
            if name.startswith("sleep"):
                level = int(name[-1])
            elif name == "wake weights" and level == 2:
                found.load()  # vLLM's caller loads the weights after level 2
                level = 0
        found.backend.resume()
        if level == 2:
            found.load()
        assert found.is_loaded(), rest
        assert found.driver.live() == 2
        found.close()


@pytest.mark.parametrize("more", [0, 1])
def test_weights_are_the_same_after_a_failure_of_any_call(tmp_path: Path, more: int) -> None:
    arenas = ArenaPool(tmp_path, 4 * SIZE)
    for at in range(2 - more, 30):  # a backend that cannot pin goes on, if no other call fails
        found = Device(arenas)
        found.driver.fake.fake_fail_at(at, more)
        with pytest.raises(DriverError):
            for _ in range(2):
                found.backend.suspend()
                found.backend.resume()
        found.driver.fake.fake_fail_at(-1, 0)
        found.backend.suspend()
        found.backend.resume()
        assert found.is_loaded(), at
        assert found.driver.live() == 2
        found.close()
        if not more:  # a driver that fails every call cannot unpin
            assert found.driver.fake.fake_registered() == found.pinned


@pytest.mark.parametrize("at", [1, 2, 4, 5, 6, 9, 12, 14])
def test_process_killed_at_any_call_leaves_room_for_others(tmp_path: Path, at: int) -> None:
    arenas = ArenaPool(tmp_path, 2 * SIZE)
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)  # the threads of this process are not in its child
        found, calls = Device(arenas), itertools.count(1)

        def kill(*arguments: Any) -> Any:
            if next(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        call = device.call
        device.call = kill
        found.backend.suspend()
        found.backend.resume()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    arenas.create_arena("other", 2 * SIZE).close()
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]
