"""vLLM KV connector that moves a running request together with its KV to another server (ParaServe, section 6.2).

The source server pins the KV blocks of the request and continues to generate, while the target server copies the blocks.
When the gateway ends the request at the source, the source pins the rest, too. The target receives the request as a
prompt, and vLLM loads the KV of all its tokens but the last through this connector. The target computes only that token,
as the source would have. The gateway sends all handover messages (coldstart.contract.handover).

Invariants: a pinned block is not freed before its lease ends, and is freed in the first iteration after that. A worker
sends pinned blocks only after every earlier iteration has ended on its device, so their KV is complete. A failed transfer is
reported to vLLM, which recomputes the blocks.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Collection, Iterable
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
from vllm.v1.kv_cache_interface import is_full_attention_spec

from coldstart.contract import environment, handover
from coldstart.contract.handover import HandoverError, LoadQuery, LoadResult, Message, Pin, Pull
from coldstart.vllm.handover.blocks import KvBlocks
from coldstart.vllm.handover.staging import create_staging
from coldstart.vllm.handover.wire import BlockQuery, DataPort, Layers, TransferError, fetch_layers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger("vllm.coldstart.handover")

LEASE_S = 15.0
# Maximum time that a query waits for its pin: it can arrive before the iteration that announces the pin.
PIN_WAIT_S = 5.0
MAX_PINS = 64


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Pinned blocks, which a worker sends only to a client that knows `secret`."""

    secret: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwaitedEnd:
    """Request whose blocks are to be pinned as `pin` if it ends by `until`, in seconds of the monotonic clock."""

    pin: str
    secret: str
    until: float


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Planned load of the remote blocks in `pull`, except the first `skip_blocks`, into the local `blocks`."""

    request_id: str
    pull: Pull
    skip_blocks: int
    blocks: tuple[int, ...]


@dataclass
class HandoverMetadata(KVConnectorMetadata):
    """Metadata that the scheduler sends to the workers in one iteration: new pins, ended pins and new loads."""

    pinned: dict[str, HeldBlocks] = field(default_factory=dict)
    ended_pins: set[str] = field(default_factory=set)
    loads: list[KvLoad] = field(default_factory=list)


@dataclass
class RankPort(KVConnectorHandshakeMetadata):
    """Host and port at which one rank serves its KV blocks."""

    address: tuple[str, int]


class HandoverScheduler:
    """Scheduler side of the connector, which pins blocks on request and plans loads for requests with a `Pull` message.

    Servers can exchange KV only if they have the same `shape` (see `digest_kv_layout`).
    """

    def __init__(self, key: str, shape: str, block_size: int, movable: bool) -> None:
        self._key, self._shape, self._block_size, self._movable = key, shape, block_size, movable
        self.ports: tuple[tuple[str, int], ...] = ()
        self.manager: KVCacheManager | None = None
        self._requests: dict[str, Request] = {}
        self._pulls: dict[str, Pull] = {}
        self._answers: dict[str, Message] = {}
        self._held: dict[str, tuple[list[KVCacheBlock], float]] = {}
        self._awaited: dict[str, AwaitedEnd] = {}
        self._loads: dict[str, KvLoad] = {}
        self._failed_loads: set[str] = set()
        # Whether the KV was loaded, by pin.
        self._results: dict[str, bool] = {}
        self._step = HandoverMetadata()

    def add_request(self, request: Request) -> None:
        """Add a new request, and process its handover message. An invalid message is logged and ignored."""
        try:
            message = handover.verify_and_decode(self._key, request.kv_transfer_params)
            if isinstance(message, Pull | Pin) and not (self._movable and self.ports):
                raise HandoverError("cannot move the KV of a request: this server does not support that")
            if isinstance(message, Pull):
                if message.shape != self._shape:
                    raise HandoverError("cannot load the KV: the source has other weights or KV layout")
                self._pulls[request.request_id] = message
            elif isinstance(message, Pin):
                self._answers[request.request_id] = self._hold(message)
            elif isinstance(message, LoadQuery):
                self._answers[request.request_id] = LoadResult(self._results.get(message.pin, False))
        except HandoverError as error:
            log.warning("cannot hand over the KV of a request: %s", error)
        # vLLM interprets these parameters itself for other connectors.
        request.kv_transfer_params = None
        self._requests[request.request_id] = request

    def _hold(self, pin: Pin) -> Pull:
        if len(self._held) + len(self._awaited) >= MAX_PINS:
            raise HandoverError(f"cannot retain the KV of another request: the limit is {MAX_PINS} requests")
        request = self._find(pin.request)
        if handover.digest_tokens(request.all_token_ids[: pin.tokens]) != pin.digest:
            raise HandoverError(
                f"cannot retain the KV of {pin.request}: its tokens differ from the gateway's"
            )
        name, secret = secrets.token_hex(16), secrets.token_hex(32)
        if pin.at_end:
            self._awaited[request.request_id] = AwaitedEnd(name, secret, time.monotonic() + LEASE_S)
            tokens = request.num_prompt_tokens + request.max_tokens
        else:
            tokens = min(request.num_computed_tokens, request.num_tokens, pin.tokens)
            self._retain(request, tokens, name, secret)
        return Pull(name, secret, tokens, self._shape, self.ports)

    def _retain(self, request: Request, tokens: int, name: str, secret: str) -> None:
        """Pin the blocks with the KV of the first `tokens` tokens, and announce the pin to the workers.

        Raises:
            HandoverError: The request has no KV, or no longer has it.
        """
        assert self.manager is not None
        count = -(-tokens // self._block_size)
        blocks = list(self.manager.get_blocks(request.request_id).blocks[0])[:count]
        if not blocks or request.request_id in self._loads:
            number = request.request_id
            raise HandoverError(
                f"cannot retain the KV of request {number}: it has none yet, or was preempted"
            )
        self.manager.block_pool.touch(blocks)
        self._held[name] = blocks, time.monotonic() + LEASE_S
        self._step.pinned[name] = HeldBlocks(secret, tuple(block.block_id for block in blocks))

    def _find(self, name: str) -> Request:
        """Return the running request that has this client-side ID, to which vLLM adds a prefix, an index and random digits."""
        begins = tuple(f"{kind}-{name}-" for kind in ("cmpl", "chatcmpl"))
        found = [
            request
            for number, request in self._requests.items()
            if number in (begins[1][:-1], begins[0][:-1]) or number.startswith(begins)
        ]
        if len(found) != 1:
            raise HandoverError(f"expected one running request with ID {name}, but found {len(found)}")
        return found[0]

    def count_loadable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return the number of tokens whose KV can be loaded beyond the `computed_tokens` in the local prefix cache.

        The KV of the last token is not among them: vLLM computes this token in any case, and the source may not have done so.
        """
        pull = self._pulls.get(request.request_id)
        return max(0, min(pull.tokens, request.num_tokens - 1) - computed_tokens) if pull else 0

    def plan_load(self, request: Request, blocks: KVCacheBlocks, loaded_tokens: int) -> None:
        """Plan to load the KV of `loaded_tokens` tokens beyond the local prefix cache into allocated blocks."""
        pull = self._pulls.pop(request.request_id, None)
        if pull is None:
            return
        if loaded_tokens <= 0:
            # The local prefix cache has all of it, unless the request must not read from it.
            self._record(pull.pin, loaded=not request.skip_reading_prefix_cache)
            return
        end = min(pull.tokens, request.num_tokens - 1)
        skip = (end - loaded_tokens) // self._block_size
        chosen = blocks.get_block_ids()[0][skip : -(-end // self._block_size)]
        load = KvLoad(request.request_id, pull, skip, tuple(chosen))
        self._step.loads.append(load)
        self._loads[request.request_id] = load

    def record_results(self, finished: Iterable[str], invalid_blocks: Collection[int]) -> None:
        """Record which loads have finished, and which have failed because some of their blocks are invalid."""
        for number, load in self._loads.items():
            if not set(load.blocks).isdisjoint(invalid_blocks):
                self._failed_loads.add(number)
        for number in finished:
            if (ended := self._loads.pop(number, None)) is not None:
                self._record(ended.pull.pin, loaded=number not in self._failed_loads)
                self._failed_loads.discard(number)

    def _record(self, pin: str, *, loaded: bool) -> None:
        if len(self._results) >= MAX_PINS:
            del self._results[next(iter(self._results))]
        self._results[pin] = loaded

    def build_metadata(self) -> HandoverMetadata:
        """Return the metadata for the workers' next iteration, and free the blocks of pins whose lease has ended.

        Blocks of a request that is still to end are no longer awaited after the duration of a lease.
        """
        now = time.monotonic()
        for number in [number for number, awaited in self._awaited.items() if awaited.until <= now]:
            del self._awaited[number]
        for pin in [pin for pin, (_, until) in self._held.items() if until <= now]:
            self._release(pin)
        step, self._step = self._step, HandoverMetadata()
        return step

    def _release(self, pin: str) -> None:
        assert self.manager is not None
        blocks, _ = self._held.pop(pin)
        self.manager.block_pool.free_blocks(reversed(blocks))
        self._step.ended_pins.add(pin)

    def remove_request(self, request: Request) -> dict[str, Any] | None:
        """Remove a finished request, and return the signed handover parameters for its response, or None if it has none."""
        self._requests.pop(request.request_id, None)
        self._pulls.pop(request.request_id, None)
        awaited = self._awaited.pop(request.request_id, None)
        if awaited is not None:
            tokens = min(request.num_computed_tokens, request.num_tokens)
            try:
                self._retain(request, tokens, awaited.pin, awaited.secret)
            except HandoverError as error:
                log.warning("cannot hand over the KV of a request: %s", error)
        answer = self._answers.pop(request.request_id, None)
        return None if answer is None else handover.sign(self._key, answer)


class BlockTransfers:
    """Worker side of the connector, which sends pinned blocks of its rank and fetches blocks from other servers."""

    def __init__(self, host: str, blocks: KvBlocks) -> None:
        self._blocks = blocks
        self._held: dict[str, HeldBlocks] = {}
        self._announced = threading.Condition()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._lock = threading.Lock()
        self._staging = create_staging()
        self.port = DataPort(host, self._find_secret, self._read, self._staging)

    def apply_metadata(self, metadata: HandoverMetadata) -> None:
        """Add the new pins, drop the ended pins, and start the loads that the scheduler announced for this iteration."""
        if metadata.pinned or metadata.loads:
            self._blocks.mark_iteration()
        with self._announced:
            self._held |= metadata.pinned
            for pin in metadata.ended_pins:
                self._held.pop(pin, None)
            self._announced.notify_all()
        for load in metadata.loads:
            try:
                threading.Thread(target=self._fetch, args=(load,), name="kv-handover", daemon=True).start()
            except RuntimeError as error:  # no thread is free
                self._record_end(load, error)

    def _find_secret(self, pin: str) -> str | None:
        with self._announced:
            self._announced.wait_for(lambda: pin in self._held, PIN_WAIT_S)
            held = self._held.get(pin)
        return None if held is None else held.secret

    def _read(self, query: BlockQuery) -> Layers:
        with self._announced:
            held = self._held.get(query.pin)
        wanted = held.blocks[query.skip :][: query.count] if held and query.skip >= 0 else ()
        for name in set(self._blocks.layers) & set(query.layers):
            try:
                data = self._blocks.read(name, wanted)
            except RuntimeError as error:  # for example, the device has no memory for a copy
                log.warning("cannot send the KV of a request, which its new server computes again: %s", error)
                return
            with self._announced:
                if query.pin not in self._held:  # the blocks may already belong to another request
                    return
            yield name, data

    def _fetch(self, load: KvLoad) -> None:
        began, missing, total = time.monotonic(), set(self._blocks.layers), 0
        count = len(load.blocks)
        query = BlockQuery(load.pull.pin, load.skip_blocks, count, self._blocks.layers)
        try:
            for address in load.pull.ranks:
                for name, data in fetch_layers(
                    address,
                    load.pull.secret,
                    query,
                    lambda name: count * self._blocks.get_block_bytes(name),
                    self._staging,
                ):
                    self._blocks.write(name, load.blocks, data)
                    missing.discard(name)
                    total += len(data)
            if missing:
                raise TransferError(f"the source sent no KV for layer {min(missing)}")
            log.info("loaded the KV of a request: %d bytes in %.3f s", total, time.monotonic() - began)
            if self._staging is not None:
                log.info("NIXL so far: %d layers, %d failures", self._staging.reads, self._staging.failures)
        except Exception as error:  # noqa: BLE001  the request must not wait forever, whatever failed
            self._record_end(load, error)
        else:
            self._record_end(load)

    def _record_end(self, load: KvLoad, error: Exception | None = None) -> None:
        if error is not None:
            log.warning("cannot load the KV of a request, which is recomputed: %s", error)
        with self._lock:
            self._failed |= set(load.blocks if error else ())
            self._finished.add(load.request_id)

    def pop_finished_requests(self) -> set[str]:
        """Return the IDs of the requests whose load has ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def pop_failed_blocks(self) -> set[int]:
        """Return the IDs of the blocks whose load has failed since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed


class KvHandoverConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector that vLLM instantiates once in the scheduler and once in each worker.

    `kv_connector_extra_config` contains `host`, the address of the data ports, and `identity`, which is equal for servers
    that have the same weights.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        self._scheduler: HandoverScheduler | None = None
        self._worker: BlockTransfers | None = None
        self._error = find_incompatibility(vllm_config, kv_cache_config)
        self._ranks = vllm_config.parallel_config.world_size
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = HandoverScheduler(
                environment.HANDOVER_KEY.read(),
                digest_kv_layout(vllm_config, str(extra("identity", ""))),
                vllm_config.cache_config.block_size,
                not self._error,
            )
            if self._error:
                log.warning("cannot move the KV of requests: %s", self._error)
        self._host, self._count = str(extra("host", "127.0.0.1")), kv_cache_config.num_blocks

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
        self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        assert self._scheduler is not None
        count = self._scheduler.count_loadable_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.plan_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HandoverMetadata:
        assert self._scheduler is not None
        return self._scheduler.build_metadata()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._scheduler is not None
        finished = connector_output.finished_recving or ()
        self._scheduler.record_results(finished, connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        return False, self._scheduler.remove_request(request)

    # MultiConnector calls `request_finished` if one of its other connectors supports a single KV cache group only.
    request_finished_all_groups = request_finished

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._error:
            return
        try:
            named = {f"{name} {self._describe_format(name)}": cache for name, cache in kv_caches.items()}
            self._worker = BlockTransfers(self._host, KvBlocks(named, self._count))
        except (KeyError, ValueError, RuntimeError, OSError) as error:
            log.warning("cannot move the KV of requests: %s: %s", type(error).__name__, error)

    def _describe_format(self, layer: str) -> str:
        """Return what determines the meaning of a layer's bytes: the attention backend and, on a CPU, its instruction set."""
        module: Any = self._vllm_config.compilation_config.static_forward_context[layer]
        return f"{module.get_attn_backend().get_name()} {getattr(module, 'isa', '')}".rstrip()

    def get_handshake_metadata(self) -> RankPort | None:
        return None if self._worker is None else RankPort(self._worker.port.address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, HandoverMetadata)
        if self._worker is not None:
            self._worker.apply_metadata(step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = self._worker.pop_finished_requests() if self._worker is not None else None
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.pop_failed_blocks() if self._worker is not None else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are sent directly from vLLM's KV cache."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks are sent directly from vLLM's KV cache."""


def find_incompatibility(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the reason why this server cannot move requests with their KV, or an empty string."""
    parallel, groups = config.parallel_config, kv_cache_config.kv_cache_groups
    # The KV of a sliding window lacks its first blocks, and the state of a recurrent layer has none.
    if len(groups) != 1 or not is_full_attention_spec(groups[0].kv_cache_spec):
        return "the model has no KV cache, several kinds of it, or one without full attention"
    if parallel.world_size != parallel.pipeline_parallel_size:
        return "the server uses tensor parallelism"
    if config.speculative_config is not None:
        return "the server uses speculative decoding"
    return ""


def digest_kv_layout(config: VllmConfig, identity: str) -> str:
    """Return a digest that is equal for servers that can exchange KV: same weights, block size and KV data type."""
    cache = config.cache_config
    parts = (identity, cache.block_size, cache.cache_dtype, config.model_config.dtype)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
