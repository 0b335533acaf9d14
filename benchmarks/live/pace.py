"""Several engines on one core at once, each with the same share of it: the machine's drift is everybody's at the same moment.

A shared machine is slower by half for ten seconds at a time. Servers that are measured one after another meet different
machines then, and above load 1 a queue makes much of it; servers that serve the same requests at the same time do not. An
iteration takes 1/share times as long, and so does every one in the bundle's iteration profile, by which a scheduler books.
The share is kept by the kernel (CFS bandwidth of the cpu controller, cgroup v1), idle neighbours or not. What is left between
two servers alike is the luck of their places, in memory and in the kernel's periods, 5 to 15 % of what waits: each repetition
has servers of its own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store

from coldstart.machine import paths

GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 20_000
SHARE = "share_of_core"
_CURVES = ("prefill", "decode")


def cap(process: int, share: float) -> None:
    """That share of a core, and no more, for all threads of the process. Raises SystemExit where the kernel cannot."""
    group = _group(process)
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
        (group / "cgroup.procs").write_text(str(process))
    except OSError as problem:
        raise SystemExit(
            f"servers side by side need the cpu controller of cgroup v1, writable: {problem}"
        ) from None


def release(processes: set[int]) -> None:
    """After their end."""
    for group in map(_group, processes):
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.1)  # not all of its threads are gone


def _group(process: int) -> Path:
    return GROUPS / f"coldstart-live-{process}"


def paced(ref: str, share: float) -> None:
    """A next version of the bundle, its iterations as long as with that share of a core; none where they are already."""
    bundle = Store(paths.Cache.at().bundles).get(ref)
    profile: dict[str, Any] = dict(bundle.json("iterations"))  # type: ignore[call-overload]
    factor = profile.get(SHARE, 1.0) / share
    if factor == 1:
        return
    scaled = {curve: [[size, factor * seconds] for size, seconds in profile[curve]] for curve in _CURVES}
    _publish(bundle, {**profile, **scaled, SHARE: share})


def _publish(bundle: Bundle, iterations: dict[str, Any]) -> None:
    with bundle.store.begin(bundle.manifest.key) as draft:
        for section in bundle.manifest.sections:
            if section.type != "iterations":
                draft.keep(bundle, section.type)
        draft.add_json("iterations", iterations)
        draft.publish(bundle.manifest.provenance, signer=sign.host_key(paths.state_dir()))
