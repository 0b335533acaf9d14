"""Arenas of weights: their limit over processes, eviction, and that nothing is left behind."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tools import tiny_models

from coldstart.vllm.sleep import memory
from coldstart.vllm.sleep.memory import Arena, ArenaPool, ArenaSpaceError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
SIZE = 1 << 20
OWNER = """
import ctypes, os, sys
from pathlib import Path
from coldstart.vllm.sleep.memory import ArenaPool
arena = ArenaPool(Path(sys.argv[1]), 1 << 21).create_arena("other", 1 << 20)
ctypes.memset(arena.address, 7, arena.size)
arena.call_on_eviction(lambda: os.write(1, b"released\\n"))  # takes no lock that the exit needs
print("filled", flush=True)
sys.stdin.readline()
print(arena.explain_eviction())
"""


def _held() -> tuple[int, int]:
    """Return the number of descriptors of this process, and of its mappings of arenas."""
    mappings = Path("/proc/self/maps").read_text().count("coldstart-sleep")
    return len(list(Path("/proc/self/fd").iterdir())), mappings


def _fill(arena: Arena, value: int) -> None:
    with arena.protect() as reason:
        assert reason is None
        ctypes.memset(arena.address, value, arena.size)


def test_arena_evicts_the_least_recently_used_with_a_reason(tmp_path: Path) -> None:
    arenas, held = ArenaPool(tmp_path, 2 * SIZE), _held()
    first, second = arenas.create_arena("first", SIZE), arenas.create_arena("second", SIZE)
    _fill(second, 2)
    _fill(first, 1)
    third = arenas.create_arena("third", SIZE)
    with second.protect() as reason:
        assert reason == "another model needed the memory: 1.0 MiB for third"
    assert first.explain_eviction() is None and ctypes.string_at(first.address, 2) == b"\1\1"
    for arena in (first, second, third):
        arena.close()
    assert [one.name for one in tmp_path.iterdir()] == ["lock"] and _held() == held


def test_arena_in_use_is_not_evicted(tmp_path: Path) -> None:
    arenas = ArenaPool(tmp_path, SIZE)
    with (
        arenas.create_arena("first", SIZE).protect(),
        pytest.raises(ArenaSpaceError, match=r"1\.0 MiB of 1\.0 MiB"),
    ):
        arenas.create_arena("second", SIZE)


def test_arena_above_the_limit_evicts_nothing(tmp_path: Path) -> None:
    arenas = ArenaPool(tmp_path, SIZE)
    first = arenas.create_arena("first", SIZE)
    with pytest.raises(ArenaSpaceError, match="COLDSTART_SLEEP_MEMORY_BYTES"):
        arenas.create_arena("large", 2 * SIZE)
    assert first.explain_eviction() is None


def test_arena_of_another_process_is_evicted_and_its_owner_notified(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "filled\n"
    own = ArenaPool(tmp_path, SIZE).create_arena("own", SIZE)
    assert owner.stdout.readline() == "released\n"
    assert owner.communicate("\n")[0] == "another model needed the memory: 1.0 MiB for own\n"
    own.close()


def test_descriptor_that_was_reused_is_not_emptied(tmp_path: Path) -> None:
    arenas = ArenaPool(tmp_path / "arenas", SIZE)
    arena = arenas.create_arena("first", SIZE)
    innocent = tmp_path / "innocent"
    innocent.write_bytes(b"data")
    with innocent.open("r+b") as file:
        os.dup2(file.fileno(), arena._descriptor)
        with pytest.raises(ArenaSpaceError):
            arenas.create_arena("second", SIZE)
    assert innocent.read_bytes() == b"data"


@pytest.mark.parametrize("failing", ["map_memory", "posix_fallocate", "write_text"])
def test_arena_closes_its_descriptors_when_it_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    arenas, held = ArenaPool(tmp_path, SIZE), _held()
    owner = {"map_memory": memory, "posix_fallocate": os, "write_text": Path}[failing]
    monkeypatch.setattr(owner, failing, Mock(side_effect=OSError(12, "Cannot allocate memory")))
    with pytest.raises(ArenaSpaceError, match="Cannot allocate memory"):
        arenas.create_arena("model", SIZE)
    assert _held() == held and not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_digest_depends_on_bytes_type_and_shape(dtype: torch.dtype) -> None:
    one = torch.zeros(4, 6, dtype=dtype)
    other = one.clone()
    assert memory.hash_tensor(one) == memory.hash_tensor(other)
    assert memory.hash_tensor(one) != memory.hash_tensor(one.reshape(6, 4))
    other[3, 5] = 1
    assert memory.hash_tensor(one) != memory.hash_tensor(other)
    assert memory.hash_tensor(other.t().contiguous().t()) == memory.hash_tensor(other)


SCRIPT = Path(__file__).parents[3] / "support/sleep_cycles.py"
# The allocator of a process grows for a while.
GROWTH_KIB = 64 << 10


@pytest.mark.vllm
@pytest.mark.parametrize(("cycles", "engines"), [(8, 2), pytest.param(200, 4, marks=pytest.mark.nightly)])
def test_models_in_the_memory_of_one_answer_the_same_after_each_wake(
    tmp_path: Path, cycles: int, engines: int
) -> None:
    base = tiny_models.shared("tiny-llama")
    (tmp_path / "runtime").mkdir(mode=0o700)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "VLLM_LOGGING_LEVEL": "ERROR"}
    argv = [sys.executable, "-P", SCRIPT, base, tmp_path, str(cycles), str(engines)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["differences"], found["fallbacks"]) == (0, [])
    assert len({str(one) for one in found["answers"]}) == engines, "the models must differ"
    before, after = found["before"], found["after"]
    assert after["resident_kib"] < before["resident_kib"] + GROWTH_KIB
    del before["resident_kib"], after["resident_kib"]
    assert before == after and found["records"] == engines
    # A fine-tune that is given its base's copy refuses it and loads its own weights.
    assert found["refused"]["tokens_are_its_own"]
    (reason,) = found["refused"]["reasons"]
    assert reason.endswith("does not match its digest; the weights were loaded again")
