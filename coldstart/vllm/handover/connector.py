"""vLLM KV connector with which another server takes over a running request together with its KV (ParaServe, section 6.2).

The source holds the blocks of the request and goes on computing it, while the target copies them. The target requests the rest
as a prompt, whose KV vLLM loads through this connector; what the source has computed meanwhile is an ordinary
prefill. All messages come from the gateway (coldstart.contract.handover).

Invariants: a block that a pin holds is not freed before its lease ends, and not held longer than until the next
iteration after it. The workers send a pin's blocks only after they have processed every earlier iteration, so the KV
of all its tokens is written. A transfer that fails is reported to vLLM, which recomputes the blocks.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from coldstart.contract import environment, handover
from coldstart.contract.handover import HandoverError, Pin, Pull
from coldstart.vllm.handover.wire import DataPort, Layers, Query, TransferError, fetch

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = init_logger("vllm.coldstart.handover")

LEASE_S = 15.0
# A query can arrive before the iteration that announces its pin.
ANNOUNCED_S = 5.0
MOST_PINS = 64


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks that a worker sends to a client that knows the secret."""

    secret: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that a worker shall fetch for a request: those of `pull` after the first `skip`, into `blocks`."""

    request: str
    pull: Pull
    skip: int
    blocks: tuple[int, ...]


@dataclass
class HandoverStep(KVConnectorMetadata):
    """Changes that the scheduler announces to the workers in one iteration."""

    pinned: dict[str, HeldBlocks] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)


@dataclass
class RankPort(KVConnectorHandshakeMetadata):
    """Address of a rank's data port."""

    address: tuple[str, int]


class KvHandoverConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that vLLM creates in the scheduler, as SourceAndTarget, and in each worker, as BlockCopies.

    `kv_connector_extra_config` has `host`, the address of the data ports, and `identity`, which is equal for servers of
    the same weights. In a worker whose KV cannot be moved, this class itself does nothing.
    """

    def __new__(cls, config: VllmConfig, role: KVConnectorRole, cache: KVCacheConfig) -> KvHandoverConnector:
        worker = cls if find_obstacle(config, cache) else BlockCopies
        made: KvHandoverConnector = super().__new__(
            SourceAndTarget if role == KVConnectorRole.SCHEDULER else worker
        )
        return made

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Do nothing in a worker."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HandoverStep:
        return HandoverStep()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing in the scheduler."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM starts a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are read from vLLM's own memory."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are read from vLLM's own memory."""


class SourceAndTarget(KvHandoverConnector):
    """Scheduler's side: holds blocks that were asked for, and plans the loads of requests with a `Pull`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._key = environment.HANDOVER_KEY.read()
        identity = self._kv_transfer_config.get_from_extra_config("identity", "")
        self._shape = describe(vllm_config, str(identity))
        self._block_size: int = vllm_config.cache_config.block_size
        self._ranks = vllm_config.parallel_config.world_size
        self._ports: tuple[tuple[str, int], ...] = ()
        self._requests: dict[str, Request] = {}
        self._pulls: dict[str, Pull] = {}
        self._answers: dict[str, Pull] = {}
        self._held: dict[str, tuple[list[KVCacheBlock], float]] = {}
        self._step = HandoverStep()
        if reason := find_obstacle(vllm_config, kv_cache_config):
            log.warning("The KV of requests cannot be moved: %s.", reason)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ports = [metadata[rank] for rank in sorted(metadata)]
        found = tuple(one.address for one in ports if isinstance(one, RankPort))
        self._ports = found if len(found) == self._ranks else ()

    def on_new_request(self, request: Request) -> None:
        """Record a new request, and obey its message. An invalid message is logged and has no effect."""
        try:
            message = handover.read(self._key, request.kv_transfer_params)
            if isinstance(message, Pull):
                self._pulls[request.request_id] = self._accept(message)
            elif isinstance(message, Pin):
                self._answers[request.request_id] = self._hold(message)
        except HandoverError as error:
            log.warning("A KV handover is refused: %s.", error)
        # vLLM gives these parameters a meaning of its own for other connectors.
        request.kv_transfer_params = None
        self._requests[request.request_id] = request

    def _accept(self, pull: Pull) -> Pull:
        if not self._ports:  # the workers have none where KV cannot be moved
            raise HandoverError("this server cannot load KV")
        if pull.shape != self._shape:
            raise HandoverError("the source has other weights or another KV layout")
        return pull

    def _hold(self, pin: Pin) -> Pull:
        if not self._ports:
            raise HandoverError("this server cannot send its KV")
        if len(self._held) >= MOST_PINS:
            raise HandoverError(f"{MOST_PINS} requests are being moved already")
        request = self._find(pin.request)
        tokens = min(request.num_computed_tokens, request.num_tokens, pin.tokens)
        if tokens <= 0:
            raise HandoverError(f"request {pin.request} has no KV yet")
        if handover.digest_tokens(request.all_token_ids[: pin.tokens]) != pin.digest:
            raise HandoverError(f"request {pin.request} has other tokens")
        count = -(-tokens // self._block_size)
        manager = self._kv_cache_manager
        blocks = list(manager.get_blocks(request.request_id).blocks[0])[:count]
        if len(blocks) < count:
            raise HandoverError(f"request {pin.request} has been preempted")
        manager.block_pool.touch(blocks)
        name, secret = secrets.token_hex(16), secrets.token_hex(32)
        self._held[name] = blocks, time.monotonic() + LEASE_S
        self._step.pinned[name] = HeldBlocks(secret, tuple(block.block_id for block in blocks))
        return Pull(name, secret, tokens, self._shape, self._ports)

    def _find(self, name: str) -> Request:
        """Return the running request with this external id, to which vLLM adds a prefix, its number and random digits."""
        begins = tuple(f"{kind}-{name}-" for kind in ("cmpl", "chatcmpl"))
        found = [
            request
            for number, request in self._requests.items()
            if number in (begins[1][:-1], begins[0][:-1]) or number.startswith(begins)
        ]
        if len(found) != 1:
            raise HandoverError(f"{len(found) or 'no'} requests have the id {name}")
        return found[0]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens whose KV can be loaded beyond the local prefix cache, and whether there are any."""
        pull = self._pulls.get(request.request_id)
        count = max(0, min(pull.tokens, request.num_tokens) - num_computed_tokens) if pull else 0
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of a request whose blocks are allocated; the blocks of the local prefix cache are skipped."""
        pull = self._pulls.pop(request.request_id, None)
        if pull is None or num_external_tokens <= 0:
            return
        end = min(pull.tokens, request.num_tokens)
        skip = (end - num_external_tokens) // self._block_size
        chosen = blocks.get_block_ids()[0][skip : -(-end // self._block_size)]
        self._step.loads.append(Load(request.request_id, pull, skip, tuple(chosen)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HandoverStep:
        """Return what the workers must know before the next iteration; free the blocks of ended leases."""
        now = time.monotonic()
        for pin in [pin for pin, (_, until) in self._held.items() if until <= now]:
            self._release(pin)
        step, self._step = self._step, HandoverStep()
        return step

    def _release(self, pin: str) -> None:
        blocks, _ = self._held.pop(pin)
        self._kv_cache_manager.block_pool.free_blocks(reversed(blocks))
        self._step.ended.add(pin)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget an ended request; return the parameters of its response."""
        self._requests.pop(request.request_id, None)
        self._pulls.pop(request.request_id, None)
        answer = self._answers.pop(request.request_id, None)
        return False, None if answer is None else handover.sign(self._key, answer)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))


class BlockCopies(KvHandoverConnector):
    """Worker's side: sends blocks of its rank that are pinned, and fetches blocks from another server in threads."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks = kv_cache_config.num_blocks
        self._layers: dict[str, tuple[int, int, int]] = {}
        self._held: dict[str, HeldBlocks] = {}
        self._announced = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._lock = threading.Lock()
        host = self._kv_transfer_config.get_from_extra_config("host", "127.0.0.1")
        self._port: DataPort | None = DataPort(str(host), self._find_secret, self._read)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Record the memory of each layer; without contiguous blocks this rank sends and loads nothing."""
        for name, cache in kv_caches.items():
            if cache.device.type != "cpu" or cache.shape[0] != self._blocks or not cache[0].is_contiguous():
                log.warning(
                    "The KV of requests cannot be moved: the blocks of %s are not contiguous in memory of the CPU.",
                    name,
                )
                if self._port is not None:
                    self._port.close()
                self._port = None
                return
            page = cache[0].numel() * cache.element_size()
            self._layers[name] = cache.data_ptr(), cache.stride(0) * cache.element_size(), page

    def get_handshake_metadata(self) -> RankPort | None:
        return None if self._port is None else RankPort(self._port.address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry out the scheduler's announcements of an iteration."""
        step = self._get_connector_metadata()
        assert isinstance(step, HandoverStep)
        if step.pinned or step.ended:
            with self._announced:
                self._held |= step.pinned
                for pin in step.ended:
                    self._held.pop(pin, None)
                self._announced.notify_all()
        for load in step.loads:
            threading.Thread(target=self._fetch, args=(load,), name="kv-handover", daemon=True).start()

    def _find_secret(self, pin: str) -> str | None:
        with self._announced:
            self._announced.wait_for(lambda: pin in self._held, ANNOUNCED_S)
            held = self._held.get(pin)
        return None if held is None else held.secret

    def _read(self, query: Query) -> Layers:
        with self._announced:
            held = self._held.get(query.pin)
        wanted = held.blocks[query.skip :][: query.count] if held and query.skip >= 0 else ()
        for name in self._layers.keys() & set(query.layers):
            base, stride, page = self._layers[name]
            yield name, b"".join(ctypes.string_at(base + block * stride, page) for block in wanted)

    def _fetch(self, load: Load) -> None:
        began, missing, total = time.monotonic(), set(self._layers), 0
        count = len(load.blocks)
        query = Query(load.pull.pin, load.skip, count, tuple(self._layers))
        try:
            for address in load.pull.ranks:
                for name, data in fetch(
                    address, load.pull.secret, query, lambda name: count * self._layers[name][2]
                ):
                    self._write(name, load.blocks, data)
                    missing.discard(name)
                    total += len(data)
            if missing:
                raise TransferError(f"{len(missing)} layers are missing")
            log.info("KV of a request: %d bytes in %.3f s.", total, time.monotonic() - began)
        except Exception as error:  # noqa: BLE001  the request must not wait forever, whatever failed
            log.warning("The KV of a request is computed again: %s.", error)
            with self._lock:
                self._failed |= set(load.blocks)
        with self._lock:
            self._finished.add(load.request)

    def _write(self, name: str, blocks: tuple[int, ...], data: bytes | bytearray) -> None:
        base, stride, page = self._layers[name]
        source = (ctypes.c_char * len(data)).from_buffer(data)
        for number, block in enumerate(blocks):
            ctypes.memmove(base + block * stride, ctypes.byref(source, number * page), page)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose load has ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load has failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed


def find_obstacle(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return what prevents that requests of this server are moved with their KV; empty if nothing does."""
    parallel = config.parallel_config
    if len(kv_cache_config.kv_cache_groups) != 1:
        return "the model has several kinds of KV cache"
    if parallel.world_size != parallel.pipeline_parallel_size:
        return "the server uses tensor parallelism"
    if config.speculative_config is not None:
        return "the server uses speculative decoding"
    return ""


def describe(config: VllmConfig, identity: str) -> str:
    """Return a digest that is equal for servers that can exchange KV: same weights, block size and type of KV."""
    cache = config.cache_config
    parts = (identity, cache.block_size, cache.cache_dtype, config.model_config.dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
