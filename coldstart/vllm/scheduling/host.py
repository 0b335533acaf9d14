"""What the host holds of a preempted request, asked of vLLM's own connector and remembered.

Invariants: a request shown for loading only is never admitted to compute; a remembered hit that turns out to
be gone (the host evicted it) makes the request ready to compute again instead of waiting for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.pinning import PinnedLru


class HostKv:
    """Wraps the connector's look-up; without a connector nothing is ever on the host.

    `away` holds the requests that were evicted and neither run nor load yet.
    """

    def __init__(self, connector: Any, kv_cache_manager: Any) -> None:
        self._connector, self._manager = connector, kv_cache_manager
        self._hits: dict[str, int] = {}
        self._load_only: set[str] = set()
        self.away: dict[str, Request] = {}
        self._pins = _pins(connector)
        if connector is not None:
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._matched

    def hit(self, request: Request) -> int | None:
        """Tokens that a load would bring beyond the local prefix cache; None: ask again later."""
        if self._connector is None:
            return 0
        if request.request_id not in self._hits:
            local = self._manager.get_computed_blocks(request)[1]
            tokens, _ = self._ask(request, local)
            if tokens is None:
                return None
            self._hits[request.request_id] = tokens
        return self._hits[request.request_id]

    def load_only(self, requests: Iterable[Request]) -> None:
        """In the coming step these may start a load but not compute."""
        self._load_only = {request.request_id for request in requests}

    def left(self, request: Request) -> None:
        """The request was evicted."""
        self.forget(request.request_id)
        if self._connector is not None:
            self.away[request.request_id] = request
        if self._pins is not None:
            self._pins.left(request.request_id)

    def back(self, request_id: str) -> None:
        """The request runs again, loads, or is gone."""
        self.forget(request_id)
        if self.away.pop(request_id, None) is not None and self._pins is not None:
            self._pins.back(request_id)

    def forget(self, request_id: str) -> None:
        self._hits.pop(request_id, None)

    def _matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        # Asked in any case: until the answer is not None, stores of this request still read its blocks.
        tokens, is_async = self._ask(request, computed)
        if tokens is not None:
            # Fresher than what hit() remembers: the local prefix cache and the host's both change in between.
            self._hits[request.request_id] = tokens
        if request.request_id not in self._load_only or is_async:
            return tokens, is_async
        return None, False


def _pins(connector: Any) -> PinnedLru | None:
    """The host cache's policy, where it is ours."""
    if connector is None:
        return None
    # Without a connector this vLLM need not have what the policy stands on.
    from coldstart.vllm.scheduling.pinning import PinnedLru

    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    policy = getattr(manager, "_policy", None)
    return policy if isinstance(policy, PinnedLru) else None
