"""What the express lane has to know of an engine, besides what every placement asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.view import R


class LaneView(Protocol[R]):
    """`batch`, `capacity` and `block_tokens` as for placement.KvView; a request's name is its job's id."""

    batch: int
    capacity: int
    block_tokens: int

    def job(self, request: R) -> Job:
        """Its job; `generated` is brought up to date."""

    def request(self, name: str) -> R: ...

    def name(self, request: R) -> str: ...

    def running(self) -> Sequence[R]:
        """Those that the engine served in its last step, in its order, without the ones that have left since."""

    def outside(self) -> Iterator[R]:
        """Those that wait for memory or a slot and hold neither, in the engine's order."""

    def landed(self) -> Iterable[R]:
        """Those whose KV is back from the host, and who wait for a slot."""

    def able(self, request: R) -> bool:
        """Could be started or loaded in the coming step: no copy of its own is under way."""

    def held(self, request: R) -> int:
        """Blocks it holds."""

    def needs(self, request: R) -> int:
        """Further blocks until it holds all its tokens and the next one."""

    def free_blocks(self) -> int:
        """Blocks that are free, or will be once a copy under way has landed."""

    def slots(self) -> int:
        """Slots of the model runner: who runs holds one, and who is parked or paused."""

    def evict(self, request: R) -> bool:
        """Take a request that is not shown off the device; False where a step in flight still writes its blocks."""
