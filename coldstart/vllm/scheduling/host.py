"""KV of preempted requests on the host: vLLM's offloading connector, with the limits that the scheduler sets.

Invariants: a request shown only for loading is never admitted to compute. If the host has evicted a cached hit,
the request becomes ready to compute again instead of waiting forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.request import Request


class PolicyOffloadingConnector(OffloadingConnector):
    """vLLM's connector, named by --kv-transfer-config, which is asked before each admission.

    `hits` are the latest answers by request id. A request in `load_only` may start a load but not compute.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hits: dict[str, int] = {}
        self.load_only: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that a load would bring, and whether it is asynchronous; None if vLLM must ask again later."""
        # Always ask the host: until its answer is not None, stores of this request still read its blocks.
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            # Newer than the value of find_hit(): both the local prefix cache and the host's change in between.
            self.hits[request.request_id] = tokens
        if request.request_id not in self.load_only or is_async:
            return tokens, is_async
        return None, False

    def find_hit(self, request: Request, manager: Any) -> int | None:
        """Return the tokens that a load would bring beyond the local prefix cache; None if the answer is not known yet."""
        if request.request_id not in self.hits:
            tokens, _ = super().get_num_new_matched_tokens(request, manager.get_computed_blocks(request)[1])
            if tokens is None:
                return None
            self.hits[request.request_id] = tokens
        return self.hits[request.request_id]


class HostKv:
    """Evicted requests; without a connector, no KV is on the host.

    `away` contains the evicted requests that neither run nor load yet.
    """

    def __init__(self, connector: PolicyOffloadingConnector | None, kv_cache_manager: Any) -> None:
        self._connector, self._manager = connector, kv_cache_manager
        self.away: dict[str, Request] = {}

    def hit(self, request: Request) -> int | None:
        """Return the tokens of the request that the host holds; None if the answer is not known yet."""
        return 0 if self._connector is None else self._connector.find_hit(request, self._manager)

    def load_only(self, requests: Iterable[Request]) -> None:
        """Allow these requests to start a load but not to compute in the next step."""
        if self._connector is not None:
            self._connector.load_only = {request.request_id for request in requests}

    def record_eviction(self, request: Request) -> None:
        """Record that the request was evicted."""
        self.back(request.request_id)
        if self._connector is not None:
            self.away[request.request_id] = request

    def back(self, request_id: str) -> None:
        """Record that the request runs again, loads, or has finished."""
        if self._connector is not None:
            self._connector.hits.pop(request_id, None)
        self.away.pop(request_id, None)
