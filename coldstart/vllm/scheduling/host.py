"""KV of preempted requests on the host, as vLLM's connector reports it, cached.

Invariants: a request shown only for loading is never admitted to compute. If the host has evicted a cached hit,
the request becomes ready to compute again instead of waiting forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import Request


class HostKv:
    """Wraps the connector's lookup; without a connector, no KV is on the host.

    `away` contains the evicted requests that neither run nor load yet.
    """

    def __init__(self, connector: Any, kv_cache_manager: Any) -> None:
        self._connector, self._manager = connector, kv_cache_manager
        self._hits: dict[str, int] = {}
        self._load_only: set[str] = set()
        self.away: dict[str, Request] = {}
        if connector is not None:
            self._ask = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = self._matched

    def hit(self, request: Request) -> int | None:
        """Return the tokens that a load would bring beyond the local prefix cache; None if the answer is not known yet."""
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
        """Allow these requests to start a load but not to compute in the next step."""
        self._load_only = {request.request_id for request in requests}

    def record_eviction(self, request: Request) -> None:
        """Record that the request was evicted."""
        self.forget(request.request_id)
        if self._connector is not None:
            self.away[request.request_id] = request

    def back(self, request_id: str) -> None:
        """Record that the request runs again, loads, or has finished."""
        self.forget(request_id)
        self.away.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        self._hits.pop(request_id, None)

    def _matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        # Always ask the connector: until its answer is not None, stores of this request still read its blocks.
        tokens, is_async = self._ask(request, computed)
        if tokens is not None:
            # Newer than the value of hit(): both the local prefix cache and the host's change in between.
            self._hits[request.request_id] = tokens
        if request.request_id not in self._load_only or is_async:
            return tokens, is_async
        return None, False
