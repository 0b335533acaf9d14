"""What a long run holds, by the roles of its processes, and whether that grows.

Flat, of each quantity: its median over the samples of the last third is at most 5 % and 2 (of bytes: 5 % and 4 MiB) above the
one over the second third; the first third is warm-up. Only samples with the most common number of residents count, and what is
one resident's is judged by resident. Slopes (Theil and Sen) are over both thirds.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median, mode
from typing import Any

import psutil

SHARE, COUNT, BYTES = 0.05, 2, 4 << 20


def _role(process: psutil.Process, above: str) -> str:
    words, name = " ".join(process.cmdline()), process.name()
    for part, role in (("ray::ControllerActor", "controller"), ("ray::ServerActor", "actor")):
        if words.startswith(part):
            return role
    if above == "template" or above == "server" or name.startswith("VLLM"):
        return "server"
    if "coldstart.gateway.starter" in words:
        return "supervisor" if above == "starter" else "starter"
    if "coldstart.cluster.client" in words:
        return "client"
    return "ray" if above in ("gateway", "join", "ray") else above


def _family(process: psutil.Process, role: str) -> Iterator[tuple[psutil.Process, str]]:
    yield process, role
    for child in process.children():
        try:
            yield from _family(child, _role(child, role))
        except psutil.Error:
            continue


def sample(roots: Sequence[tuple[int, str]], places: Mapping[str, Path]) -> dict[str, Any]:
    """What the families of these processes hold now, by role, and what there is below these directories."""
    roles: dict[str, Counter[str]] = {}
    family = dict(one for pid, role in roots for one in _family(psutil.Process(pid), role))
    for process, role in family.items():
        try:
            memory = process.memory_full_info()
            held = {"descriptors": process.num_fds(), "threads": process.num_threads()}
        except psutil.Error:
            continue
        sums = {"processes": 1, **held, "pss_bytes": memory.pss, "rss_bytes": memory.rss}
        roles.setdefault(role, Counter()).update(sums)
    found: dict[str, Any] = {"roles": {role: dict(sums) for role, sums in sorted(roles.items())}}
    for name, directory in places.items():
        sizes = [size for file in directory.rglob("*") if (size := _size(file)) is not None]
        found |= {f"{name}_files": len(sizes), f"{name}_bytes": sum(sizes)}
    return found | {"segments": sum(1 for _ in Path("/dev/shm").iterdir())}


def _size(file: Path) -> int | None:
    try:
        found = file.lstat()
    except OSError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else found.st_size


def _figures(one: Mapping[str, Any], by: str, shared: Sequence[str]) -> dict[str, float]:
    found = {
        name: float(one[name]) for name in one if name.endswith(("_files", "_bytes")) or name == "segments"
    }
    for role, sums in one["roles"].items():
        share = max(1, one[by]) if role in shared else 1
        found |= {f"{role} {name}": value / share for name, value in sums.items()}
    return found


def judged(samples: Sequence[Mapping[str, Any]], by: str, shared: Sequence[str]) -> dict[str, Any]:
    """Each quantity's medians of the second and the last third, its slope an hour, and whether it is flat.

    The roles in `shared` are judged by their part of what `by` counts. Nothing for fewer samples than three."""
    third = len(samples) // 3
    if not third:
        return {}
    usual = mode(one[by] for one in samples[third:])
    parts = [
        [(one["at_s"], _figures(one, by, shared)) for one in part if one[by] == usual]
        for part in (samples[third : 2 * third], samples[2 * third :])
    ]
    if not all(parts):
        return {}
    found, both = {}, [*parts[0], *parts[1]]
    for name in sorted(set.intersection(*(set(figures) for _, figures in both))):
        second, last = (median(figures[name] for _, figures in part) for part in parts)
        points = [(at, figures[name]) for at, figures in both]
        slopes = [(b - a) / (later - at) for (at, a), (later, b) in combinations(points, 2)]
        found[name] = {
            "second_third": second,
            "last_third": last,
            "slope_an_hour": 3600 * median(slopes or [0.0]),
            "flat": last <= (1 + SHARE) * second + (BYTES if name.endswith("_bytes") else COUNT),
        }
    not_flat = [name for name, one in found.items() if not one["flat"]]
    return {by: usual, "samples": len(both), "not_flat": not_flat, "quantities": found}
