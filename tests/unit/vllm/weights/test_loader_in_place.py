"""Delayed copies have the same visible effect as immediate copies."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coldstart.system.proc import memory
from coldstart.vllm.weights.in_place import InPlace

WIDTH = 8


class Source:
    """Return consecutively numbered rows of a private mapping."""

    def __init__(self, rows: int) -> None:
        self.mapping = mmap.mmap(-1, rows * WIDTH * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view, self.used = memoryview(self.mapping), set[int]()
        torch.frombuffer(self.view, dtype=torch.float32)[:] = torch.arange(rows * WIDTH)

    def rows(self, first: int, count: int, mode: InPlace | None) -> torch.Tensor:
        span = self.view[first * WIDTH * 4 : (first + count) * WIDTH * 4]
        tensor = torch.frombuffer(span, dtype=torch.float32).view(count, WIDTH)
        return tensor if mode is None else mode.offer(tensor, span)

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - memory.address(self.view) < len(self.view)


def parameter(rows: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((rows, WIDTH), -1.0), requires_grad=False)


def numbered(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * WIDTH, (first + count) * WIDTH, dtype=torch.float32).view(count, WIDTH)


def test_matching_layout_is_not_copied() -> None:
    source, fused, single = Source(8), parameter(5), parameter(2)
    with InPlace([fused, single]) as mode:
        fused.data[3:].copy_(source.rows(3, 2, mode))
        single.data.copy_(source.rows(6, 2, mode))
        fused.data[:3].copy_(source.rows(0, 3, mode))
    assert source.holds(fused) and source.holds(single) and mode.given_bytes == 7 * WIDTH * 4
    assert torch.equal(fused, numbered(0, 5)) and torch.equal(single, numbered(6, 2))


def test_other_layout_is_copied() -> None:
    source, fused = Source(8), parameter(5)
    with InPlace([fused]) as mode:
        for first, count, at in ((4, 2, 0), (0, 2, 2), (7, 1, 4)):
            fused.data[at : at + count].copy_(source.rows(first, count, mode))
    assert not source.holds(fused) and mode.given_bytes == 0
    assert torch.equal(fused, torch.cat([numbered(4, 2), numbered(0, 2), numbered(7, 1)]))


def test_missing_part_is_unchanged() -> None:
    source, fused = Source(4), parameter(3)
    with InPlace([fused]) as mode:
        fused.data[:2].copy_(source.rows(0, 2, mode))
    assert torch.equal(fused[:2], numbered(0, 2)) and (fused[2:] == -1).all()


def test_slice_of_a_rank_is_mapped() -> None:
    source, one = Source(8), parameter(2)
    with InPlace([one]) as mode:
        one.data.copy_(source.rows(2, 4, mode).narrow(0, 1, 2))
    assert source.holds(one) and torch.equal(one, numbered(3, 2))


def test_another_type_is_converted() -> None:
    source, one = Source(2), torch.nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.bfloat16))
    with InPlace([one]) as mode:
        one.data.copy_(source.rows(0, 2, mode))
    assert not source.holds(one) and torch.equal(one, numbered(0, 2).bfloat16())


def test_memory_is_given_to_one_parameter_only() -> None:
    source, one, other = Source(2), parameter(2), parameter(2)
    with InPlace([one, other]) as mode:
        for each in (one, other):
            each.data.copy_(source.rows(0, 2, mode))
    one.data.fill_(5)
    assert torch.equal(other, numbered(0, 2)) and not source.holds(other)


def test_a_source_of_two_parameters_is_given_to_none_before_its_copy() -> None:
    source, one, other, third = Source(4), parameter(3), parameter(2), parameter(2)
    with InPlace([one, other, third]) as mode:
        one.data[:2].copy_(source.rows(0, 2, mode))
        other.data.copy_(source.rows(0, 2, mode))
        one.data[2:].copy_(source.rows(2, 1, mode))
        source.rows(0, 2, mode).mul_(-1)
        third.data.copy_(source.rows(0, 2, mode))
    assert torch.equal(one[:2], numbered(0, 2)) and torch.equal(other, numbered(0, 2))
    assert torch.equal(third, -numbered(0, 2))


class Kept(torch.nn.Module):
    """Module with a parameter, a buffer and an attribute; the last two are views of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(3)
        self.register_buffer("view", self.weight.data.view(-1), persistent=False)
        self.attribute = self.weight.data[1:]


def test_a_parameter_that_others_have_views_of_keeps_its_memory() -> None:
    source, kept = Source(3), Kept()
    with InPlace(kept.parameters()) as mode:
        kept.weight.data.copy_(source.rows(0, 3, mode))
    assert not source.holds(kept.weight) and torch.equal(kept.weight, numbered(0, 3))
    assert torch.equal(kept.view, numbered(0, 3).view(-1)) and torch.equal(kept.attribute, numbered(1, 2))


def test_parameters_of_one_memory_keep_it() -> None:
    source, one = Source(2), parameter(2)
    other = torch.nn.Parameter(one.data, requires_grad=False)
    with InPlace([one, other]) as mode:
        one.data.copy_(source.rows(0, 2, mode))
    assert torch.equal(other, numbered(0, 2)) and other.data_ptr() == one.data_ptr()


def test_memory_that_is_replaced_meanwhile_is_still_there_to_be_written() -> None:
    source, one = Source(8), parameter(4)
    with InPlace([one]) as mode:
        one.data[:2].copy_(source.rows(0, 2, mode))
        old = one.data
        one.data = torch.zeros(4, WIDTH)
        old[2:].copy_(source.rows(2, 2, mode))
        del old
    assert not source.holds(one) and not one.any()


def test_memory_that_copies_go_to_lasts_as_long_as_they_do() -> None:
    source, memory_of = Source(4), np.full((3, WIDTH), -1.0, np.float32)
    one, held = torch.nn.Parameter(torch.from_numpy(memory_of), requires_grad=False), weakref.ref(memory_of)
    del memory_of
    with InPlace([one]) as mode:
        one.data[:2].copy_(source.rows(0, 2, mode))
        one.data = torch.zeros(3, WIDTH)
        gc.collect()
        assert held() is not None
    gc.collect()
    assert held() is None


def test_last_of_two_copies_wins() -> None:
    source, one = Source(6), parameter(3)
    with InPlace([one]) as mode:
        one.data[:2].copy_(source.rows(0, 2, mode))
        one.data[1:].copy_(source.rows(4, 2, mode))
    assert torch.equal(one, torch.cat([numbered(0, 1), numbered(4, 2)]))


def test_repeated_part_does_not_replace_a_missing_one() -> None:
    source, one = Source(6), parameter(4)
    with InPlace([one]) as mode:
        for _ in range(2):
            one.data[:2].copy_(source.rows(0, 2, mode))
    assert torch.equal(one[:2], numbered(0, 2)) and (one[2:] == -1).all()


def test_copied_source_is_released() -> None:
    source, one = Source(4), parameter(3)
    gone = weakref.ref(one)
    with InPlace([one]) as mode:
        one.data[:2].copy_(source.rows(0, 2, mode))
    del one
    gc.collect()
    assert gone() is None and mode.given_bytes == 0


def test_many_delayed_copies_take_linear_time() -> None:
    source, one = Source(4000), parameter(4000)
    rows = list(range(4000))
    Random(3).shuffle(rows)
    with InPlace([one]) as mode:
        for row in rows:
            one.data[row : row + 1].copy_(source.rows(row, 1, mode))
    assert source.holds(one) and torch.equal(one, numbered(0, 4000))


def test_nothing_depends_on_the_source_in_the_end() -> None:
    source, kept = Source(3), Kept()
    kept.view = kept.attribute = torch.zeros(0)
    with InPlace(kept.parameters()) as mode:
        kept.weight.data.copy_(source.rows(0, 3, mode))
    kept.attribute, kept.view = kept.weight.data[1:], kept.weight.data.view(-1)
    assert source.holds(kept.weight)
    mode.own(kept)
    assert not any(source.holds(one) for one in (kept.weight, kept.attribute, kept.view))
    kept.weight.data.fill_(7)
    assert (kept.attribute == 7).all() and (kept.view == 7).all()


def test_an_error_of_a_loader_comes_through() -> None:
    source, one = Source(2), parameter(2)
    with pytest.raises(RuntimeError, match="shape"), InPlace([one]) as mode:
        one.data[:1].copy_(source.rows(0, 1, mode))
        raise RuntimeError("shape")
    assert torch.equal(one[:1], numbered(0, 1))


ROWS, SIZES = 20, (2, 3, 5)
Step = Callable[[list[torch.nn.Parameter], Source, "InPlace | None", list[torch.Tensor]], object]


def _copy(which: int, at: int, first: int, count: int) -> Step:
    def step(targets: list[torch.nn.Parameter], source: Source, mode: InPlace | None, seen: object) -> None:
        room = min(count, SIZES[which] - at % SIZES[which])
        start, row = at % SIZES[which], min(first, ROWS - room)
        if source.used.isdisjoint(range(row, row + room)):  # a checkpoint hands each tensor over once
            source.used |= set(range(row, row + room))
            targets[which].data[start : start + room].copy_(source.rows(row, room, mode))

    return step


def _fill(which: int, at: int) -> Step:
    return lambda targets, source, mode, seen: targets[which].data[at % SIZES[which] :].fill_(at)


def _read(which: int) -> Step:
    return lambda targets, source, mode, seen: seen.append(targets[which].data.clone())


def _between(which: int, other: int) -> Step:
    return lambda targets, source, mode, seen: targets[which].data[:2].copy_(targets[other].data[:2])


index, row = st.integers(0, len(SIZES) - 1), st.integers(0, ROWS - 1)
step = st.one_of(
    st.builds(_copy, index, row, row, st.integers(1, 5)),
    st.builds(_fill, index, row),
    st.builds(_read, index),
    st.builds(_between, index, index),
)


@given(st.lists(step, max_size=25))
def test_any_sequence_of_operations_has_the_same_result(steps: list[Step]) -> None:
    results = []
    for deferred in (True, False):
        targets, source, seen = [parameter(size) for size in SIZES], Source(ROWS), list[torch.Tensor]()
        if deferred:
            with InPlace(targets) as mode:
                for one in steps:
                    one(targets, source, mode, seen)
        else:
            for one in steps:
                one(targets, source, None, seen)
        results.append([*seen, *(target.data for target in targets)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
