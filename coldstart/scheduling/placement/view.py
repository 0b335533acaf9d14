"""Interface to an engine's KV memory: its state, and eviction as the only change.

Invariant: a view answers for the present and caches nothing between two calls. Blocks that a copy under way
will free count as free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from coldstart.scheduling.job import Job

R = TypeVar("R", bound=Hashable)
"""Request object of the engine."""

Enst = Callable[[R], float]


class KvView(Protocol[R]):
    """KV memory of an engine.

    `capacity` is the number of blocks in the pool, and `watermark` the number that an admission leaves free.
    A request has blocks in each of `groups` KV cache groups. `speculates` is whether the number of tokens of
    the next step is uncertain.
    """

    batch: int
    token_budget: int
    capacity: int
    watermark: int
    groups: int
    speculates: bool

    def request(self, name: str) -> R:
        """Return the live request of that id. Raises KeyError."""

    def name(self, request: R) -> str: ...

    def job(self, request: R) -> Job: ...

    def ready(self, job: Job) -> bool:
        """Return whether the job can run if picked; False if the host holds its KV, which must be loaded first."""

    def started(self) -> Iterable[R]:
        """Return the requests that hold a slot, running or parked."""

    def list_evictable(self) -> Iterable[R]:
        """Return the started requests whose blocks no step under way writes."""

    def runs(self, request: R) -> bool:
        """Return whether the request holds a slot."""

    def can_proceed(self, request: R) -> bool:
        """Return whether the request holds a slot and has a token that no step under way computes."""

    def is_in_flight(self, name: str) -> bool:
        """Return whether another pipeline stage still works on the request, which is then neither served nor evicted."""

    def prefilling(self, requests: Sequence[R]) -> list[R]:
        """Return the requests with prompt tokens to compute: not running yet, or within a chunked prefill."""

    def loading(self, name: str) -> bool:
        """Return whether a load of the request is under way."""

    def is_loaded(self, request: R) -> bool:
        """Return whether the request's KV is back on the device but the request has no slot."""

    def free_blocks(self) -> int: ...

    def free_slots(self) -> int:
        """Return the number of free slots of the model runner."""

    def reserved(self) -> int:
        """Return the number of blocks that the prefills under way still need."""

    def needs(self, request: R) -> int:
        """Return the number of further blocks until the request holds all its tokens and the next one."""

    def bound(self, request: R) -> int:
        """Return an upper bound of the blocks that the request holds when its next token is computed."""

    def pending(self, request: R) -> int:
        """Return the number of tokens to compute until the next generated token."""

    def yield_freed(self, order: Sequence[R]) -> Iterator[int]:
        """Yield the number of blocks that each eviction frees, if the requests are evicted in this order."""

    def evict(self, request: R) -> None:
        """Evict the request from the device."""

    def has_evicted(self) -> bool:
        """Return whether any request was evicted and does not run yet."""

    def find_on_host(self, name: str) -> R | None:
        """Return the request if it was evicted, neither runs nor loads, and the host holds its KV; else None."""
