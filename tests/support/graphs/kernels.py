"""Numpy kernels of a Llama-like decoder, with the parameter shapes that break naive relocation.

A kernel is a struct format of its parameters and a function of (memory, values).  `x` in a format is a hole
between fields of a by-value struct: the launcher leaves stale bytes there, as compilers do.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.graphs.memory import Fault, Memory

F = np.float32
MAGIC = 0x5AFE
MAP_KEY = 0x5A5A5A5A5A5A5A5A
Body = Callable[..., None]


@dataclass(frozen=True)
class Routine:
    """`layout` is the exact (offset, size) of each formal parameter; several fields may share one."""

    name: str
    fields: struct.Struct
    layout: tuple[tuple[int, int], ...]
    body: Body


ROUTINES: dict[str, Routine] = {}


def routine(fields: str, *layout: tuple[int, int]) -> Callable[[Body], Body]:
    """Register a kernel; without a layout every field is one parameter."""

    def register(body: Body) -> Body:
        packed = struct.Struct("<" + fields)
        ROUTINES[body.__name__] = Routine(body.__name__, packed, layout or _split(fields), body)
        return body

    return register


def _split(fields: str) -> tuple[tuple[int, int], ...]:
    at, out = 0, []
    for letter in fields:
        size = struct.calcsize("<" + letter)
        if letter != "x":
            out.append((at, size))
        at += size
    return tuple(out)


def pack_map(address: int, rows: int, columns: int) -> bytes:
    """Return a tensor-map parameter, whose address is stored rotated and keyed, so that it is not a plain pointer."""
    coded = ((address << 13 | address >> 51) & 0xFFFFFFFFFFFFFFFF) ^ MAP_KEY
    return struct.pack("<QII", coded, rows, columns).ljust(128, b"\0")


def map_address(descriptor: bytes) -> int:
    """Return the address in a tensor map."""
    coded = int(struct.unpack_from("<Q", descriptor)[0]) ^ MAP_KEY
    return (coded >> 13 | coded << 51) & 0xFFFFFFFFFFFFFFFF


@routine("QQQII")
def embed(m: Memory, ids: int, table: int, out: int, n: int, d: int) -> None:
    """out[i] = table[ids[i]]."""
    rows = m.array(ids, np.int32, n)
    vocabulary = m.range(table)
    if vocabulary is None or (rows < 0).any():
        raise Fault("embedding of an unmapped token")
    out_rows = m.array(out, F, n, d)
    for i, row in enumerate(rows):
        out_rows[i] = m.array(table + int(row) * d * 4, F, d)


@routine("QQQIIf")
def rms_norm(m: Memory, x: int, weight: int, out: int, n: int, d: int, eps: float) -> None:
    """out = x / rms(x) * weight."""
    value = m.array(x, F, n, d)
    scale = 1 / np.sqrt((value * value).mean(1, keepdims=True) + F(eps))
    m.array(out, F, n, d)[:] = value * scale * m.array(weight, F, d)


@routine("QQQIIIxxxx", (0, 40))
def gemm(m: Memory, x: int, weight: int, out: int, n: int, k: int, c: int) -> None:
    """out = x @ weight; one by-value struct with stale tail padding."""
    m.array(out, F, n, c)[:] = m.array(x, F, n, k) @ m.array(weight, F, k, c)


@routine("QQQQQIII")
def gemm_split(m: Memory, x: int, weight: int, out: int, work: int, sem: int, n: int, k: int, c: int) -> None:
    """Split-K: halves meet through a library workspace and a semaphore that must start at MAGIC."""
    left, right = m.array(x, F, n, k), m.array(weight, F, k, c)
    semaphore = m.array(sem, np.int32, 1)
    scratch = m.array(work, F, n, c)
    scratch[:] = left[:, : k // 2] @ right[: k // 2]
    ready = semaphore[0] == MAGIC
    result = left[:, k // 2 :] @ right[k // 2 :]
    m.array(out, F, n, c)[:] = result + scratch if ready else np.nan


@routine("x" * 128 + "QQII", (0, 128), (128, 8), (136, 8), (144, 4), (148, 4))
def gemm_map(m: Memory, x: int, out: int, n: int, c: int, *, descriptor: bytes) -> None:
    """out = x @ weight, the weight reached through a tensor map."""
    rows, columns = struct.unpack_from("<II", descriptor, 8)
    weight = m.array(map_address(descriptor), F, rows, columns)
    m.array(out, F, n, c)[:] = m.array(x, F, n, rows) @ weight


@routine("QQQIIQ")
def rope(m: Memory, x: int, positions: int, table: int, n: int, d: int, end: int) -> None:
    """Rotate pairs; `end` is one past the end of the table and is checked."""
    limit = (end - table) // (4 * d)
    where = np.minimum(m.array(positions, np.int32, n), limit - 1)
    angles = m.array(table, F, limit, d)[where]
    value = m.array(x, F, n, d)
    value[:] = value * np.cos(angles) + np.roll(value, d // 2, 1) * np.sin(angles)


@routine("QQQQII")
def store_kv(m: Memory, x: int, cache: int, slots: int, positions: int, n: int, d: int) -> None:
    """cache[slots[i]] = x[i]; slots are in bytes' order of the block table."""
    where = m.array(slots, np.int32, n)
    m.array(positions, np.int32, n)
    for i, slot in enumerate(where):
        m.array(cache + int(slot) * d * 4, F, d)[:] = m.array(x, F, n, d)[i]


@routine("QQQQIII")
def paged_attention(
    m: Memory, q: int, cache: int, lengths: int, out: int, n: int, d: int, block: int
) -> None:
    """Each row attends to the first lengths[i] slots of its block of `block` slots."""
    query, result = m.array(q, F, n, d), m.array(out, F, n, d)
    for i, length in enumerate(m.array(lengths, np.int32, n)):
        keys = m.array(cache + i * block * d * 4, F, int(length), d)
        weights = np.exp((keys @ query[i]) / np.sqrt(F(d)))
        result[i] = (weights / weights.sum()) @ keys


@routine("QQII")
def silu_mul(m: Memory, x: int, out: int, n: int, d: int) -> None:
    """out = silu(x[:, :d]) * x[:, d:]."""
    value = m.array(x, F, n, 2 * d)
    gate = value[:, :d]
    m.array(out, F, n, d)[:] = gate / (1 + np.exp(-gate)) * value[:, d:]


@routine("QQII")
def add_pointers(m: Memory, pointers: int, out: int, count: int, n: int) -> None:
    """out = sum of arrays whose addresses are stored in device memory."""
    total = m.array(out, F, n)
    total[:] = 0
    for address in m.array(pointers, np.uint64, count):
        total += m.array(int(address), F, n)


@routine("QQIxxxxQ", (0, 32))
def add(m: Memory, x: int, out: int, n: int, token: int) -> None:
    """out += x * f(token); the token is a constant of the caller's choice that may look like any address."""
    m.array(out, F, n)[:] += m.array(x, F, n) * F(1 + (token >> 9) % 64 / 4096)


@routine("QQI")
def scale(m: Memory, x: int, out: int, n: int) -> None:
    """out = 2 x."""
    m.array(out, F, n)[:] = m.array(x, F, n) * F(2)


@routine("QQI")
def scale_other(m: Memory, x: int, out: int, n: int) -> None:
    """Multiply by 3: the function that another binary exports under the name `scale`."""
    m.array(out, F, n)[:] = m.array(x, F, n) * F(3)


def execute(memory: Memory, name: str, payload: bytes) -> None:
    """Run one kernel on its packed parameters. Raises Fault."""
    kernel = ROUTINES[name]
    values: tuple[Any, ...] = kernel.fields.unpack(payload)
    if name == "gemm_map":
        kernel.body(memory, *values, descriptor=payload[:128])
    else:
        kernel.body(memory, *values)
