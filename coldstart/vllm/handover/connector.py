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
from collections.abc import Mapping
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
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
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


class SourceAndTarget:
    """Scheduler's side: holds blocks that were asked for, and plans the loads of requests with a `Pull`.

    `shape` is equal for servers that can exchange KV.
    """

    def __init__(self, key: str, shape: str, block_size: int, movable: bool) -> None:
        self._key, self._shape, self._block_size, self._movable = key, shape, block_size, movable
        self.ports: tuple[tuple[str, int], ...] = ()
        self.manager: KVCacheManager | None = None
        self._requests: dict[str, Request] = {}
        self._pulls: dict[str, Pull] = {}
        self._answers: dict[str, Pull] = {}
        self._held: dict[str, tuple[list[KVCacheBlock], float]] = {}
        self._step = HandoverStep()

    def add(self, request: Request) -> None:
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
        if not self._movable or not self.ports:
            raise HandoverError("this server cannot load KV")
        if pull.shape != self._shape:
            raise HandoverError("the source has other weights or another KV layout")
        return pull

    def _hold(self, pin: Pin) -> Pull:
        assert self.manager is not None
        if not self._movable or not self.ports:
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
        blocks = list(self.manager.get_blocks(request.request_id).blocks[0])[:count]
        if len(blocks) < count:
            raise HandoverError(f"request {pin.request} has been preempted")
        self.manager.block_pool.touch(blocks)
        name, secret = secrets.token_hex(16), secrets.token_hex(32)
        self._held[name] = blocks, time.monotonic() + LEASE_S
        self._step.pinned[name] = HeldBlocks(secret, tuple(block.block_id for block in blocks))
        return Pull(name, secret, tokens, self._shape, self.ports)

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

    def count_loadable(self, request: Request, computed: int) -> int:
        """Return the number of tokens whose KV can be loaded beyond those in the local prefix cache."""
        pull = self._pulls.get(request.request_id)
        return max(0, min(pull.tokens, request.num_tokens) - computed) if pull else 0

    def plan_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Plan the load of a request whose blocks are allocated; the blocks of the local prefix cache are skipped."""
        pull = self._pulls.pop(request.request_id, None)
        if pull is None or tokens <= 0:
            return
        end = min(pull.tokens, request.num_tokens)
        skip = (end - tokens) // self._block_size
        chosen = blocks.get_block_ids()[0][skip : -(-end // self._block_size)]
        self._step.loads.append(Load(request.request_id, pull, skip, tuple(chosen)))

    def take_step(self) -> HandoverStep:
        """Return what the workers must know before the next iteration; free the blocks of ended leases."""
        now = time.monotonic()
        for pin in [pin for pin, (_, until) in self._held.items() if until <= now]:
            self._release(pin)
        step, self._step = self._step, HandoverStep()
        return step

    def _release(self, pin: str) -> None:
        assert self.manager is not None
        blocks, _ = self._held.pop(pin)
        self.manager.block_pool.free_blocks(reversed(blocks))
        self._step.ended.add(pin)

    def remove(self, request: Request) -> dict[str, Any] | None:
        """Forget an ended request; return the parameters of its response."""
        self._requests.pop(request.request_id, None)
        self._pulls.pop(request.request_id, None)
        answer = self._answers.pop(request.request_id, None)
        return None if answer is None else handover.sign(self._key, answer)


class BlockCopies:
    """Worker's side: sends blocks of its rank that are pinned, and fetches blocks from another server in threads."""

    def __init__(self, host: str, blocks: int) -> None:
        self._blocks = blocks
        self._layers: dict[str, tuple[int, int, int]] = {}
        self._held: dict[str, HeldBlocks] = {}
        self._announced = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._lock = threading.Lock()
        self.port = DataPort(host, self._find_secret, self._read)

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Record the memory of each layer. Raises ValueError if the blocks of a layer are not contiguous."""
        for name, cache in caches.items():
            if cache.device.type != "cpu" or cache.shape[0] != self._blocks or not cache[0].is_contiguous():
                raise ValueError(f"the KV blocks of {name} are not contiguous in memory of the CPU")
            page = cache[0].numel() * cache.element_size()
            self._layers[name] = cache.data_ptr(), cache.stride(0) * cache.element_size(), page

    def begin_step(self, step: HandoverStep) -> None:
        """Carry out the scheduler's announcements of an iteration."""
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
            data = b"".join(ctypes.string_at(base + block * stride, page) for block in wanted)
            with self._announced:
                if query.pin not in self._held:  # the blocks may already belong to another request
                    return
            yield name, data

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

    def take_finished(self) -> set[str]:
        """Return the requests whose load has ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed(self) -> set[int]:
        """Return the blocks whose load has failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed


class KvHandoverConnector(KVConnectorBase_V1, SupportsHMA):
    """Connects both sides with vLLM, which creates one instance in the scheduler and one in each worker.

    `kv_connector_extra_config` has `host`, the address of the data ports, and `identity`, which is equal for servers of
    the same weights.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._scheduler: SourceAndTarget | None = None
        self._worker: BlockCopies | None = None
        self._error = find_obstacle(vllm_config, kv_cache_config)
        self._ranks = vllm_config.parallel_config.world_size
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SourceAndTarget(
                environment.HANDOVER_KEY.read(),
                describe(vllm_config, str(extra("identity", ""))),
                vllm_config.cache_config.block_size,
                not self._error,
            )
            if self._error:
                log.warning("The KV of requests cannot be moved: %s.", self._error)
        elif not self._error:
            self._worker = BlockCopies(str(extra("host", "127.0.0.1")), kv_cache_config.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if self._scheduler is not None:
            ports = [metadata[rank] for rank in sorted(metadata)]
            found = tuple(one.address for one in ports if isinstance(one, RankPort))
            self._scheduler.ports = found if len(found) == self._ranks else ()

    def on_new_request(self, request: Request) -> None:
        assert self._scheduler is not None
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        count = self._scheduler.count_loadable(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.plan_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HandoverStep:
        assert self._scheduler is not None
        return self._scheduler.take_step()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.remove(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.remove(request)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.register(kv_caches)
        except ValueError as error:
            log.warning("The KV of requests cannot be moved: %s.", error)
            self._worker.port.close()
            self._worker = None

    def get_handshake_metadata(self) -> RankPort | None:
        return None if self._worker is None else RankPort(self._worker.port.address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, HandoverStep)
        if self._worker is not None:
            self._worker.begin_step(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = self._worker.take_finished() if self._worker is not None else None
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM starts a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are read from vLLM's own memory."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are read from vLLM's own memory."""


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
