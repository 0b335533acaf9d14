"""What placement has to know of an engine's KV memory, and the one thing it does to it: evict.

Invariant: a view answers about the present; nothing is remembered between two calls. Blocks that a copy under way will
free count as free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from coldstart.scheduling.job import Job

R = TypeVar("R", bound=Hashable)
"""A request as the engine has it."""

Enst = Callable[[R], float]


class KvView(Protocol[R]):
    """`capacity` is the pool in blocks; `watermark` are blocks that an admission leaves free; a request has blocks in
    each of `groups`; where it `speculates` the tokens of its next step are not certain.
    """

    batch: int
    token_budget: int
    capacity: int
    watermark: int
    groups: int
    speculates: bool

    def request(self, name: str) -> R:
        """The live request of that id. Raises KeyError."""

    def name(self, request: R) -> str: ...

    def job(self, request: R) -> Job: ...

    def ready(self, job: Job) -> bool:
        """Can run if picked: a request whose KV the host holds cannot, its load comes first."""

    def started(self) -> Iterable[R]:
        """Requests that hold a slot, running or parked."""

    def leavable(self) -> Iterable[R]:
        """Those of them whose blocks no step under way writes."""

    def runs(self, request: R) -> bool:
        """Holds a slot."""

    def proceeds(self, request: R) -> bool:
        """Holds a slot, and has a token left that no step under way already computes."""

    def in_flight(self, name: str) -> bool:
        """In a batch that another stage of the pipeline still works on: neither served nor evicted meanwhile."""

    def prefilling(self, requests: Sequence[R]) -> list[R]:
        """Those of them that have a prompt to compute: not running yet, or in the middle of a chunked prefill."""

    def loading(self, name: str) -> bool:
        """A load is under way."""

    def landed(self, request: R) -> bool:
        """Its KV is back on the device, its slot is not."""

    def free_blocks(self) -> int: ...

    def free_slots(self) -> int:
        """Slots of the model runner that nobody holds."""

    def reserved(self) -> int:
        """Blocks that the prefills under way still need."""

    def needs(self, request: R) -> int:
        """Further blocks until the request holds all its tokens and the next one."""

    def bound(self, request: R) -> int:
        """An upper bound of the blocks the request holds when its next token comes."""

    def pending(self, request: R) -> int:
        """Tokens to compute until its next one."""

    def freed(self, order: Sequence[R]) -> Iterator[int]:
        """Blocks that come free with each, if they leave in this order."""

    def evict(self, request: R) -> None:
        """Take the request off the device."""

    def any_away(self) -> bool:
        """Whether anybody was evicted and does not run yet."""

    def on_host(self, name: str) -> R | None:
        """The request if it was evicted, neither runs nor loads, and the host holds KV of it."""
