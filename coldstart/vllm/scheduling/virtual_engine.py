"""vLLM's own scheduler and KV connector on a virtual clock, without a model, a worker or a device.

Equation: an iteration takes profile.iteration_s(prefill tokens, decoding requests) + context_s * context of the latter.
The link to host memory carries one transfer at a time in each direction. Nothing is computed, and tokens are numbers.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from coldstart.scheduling.profile import CONTEXT_SHARE, IterationProfile
from coldstart.scheduling.settings import DEADLINE, MLFQ, SchedulerSettings
from coldstart.vllm.scheduling import kv_transfer_config
from coldstart.vllm.scheduling.scheduler import PolicyScheduler

MODEL_LENGTH = 1 << 20
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 8,
    "ffn_dim": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": MODEL_LENGTH,
    "vocab_size": 1000,
    "word_embed_proj_dim": 8,
    "torch_dtype": "float32",
}
HOST_BLOCK_BYTES = 4096
"""Host memory in bytes of one block of the model above, to which vLLM's connector rounds."""
MOST_EMPTY = 8
"""Number of consecutive empty iterations after which the engine waits: a decision may need the report of the one before."""


@dataclass(frozen=True, slots=True)
class EngineResources:
    """Resources of the engine: sizes in blocks and bytes, times in seconds.

    `slots` are those of the model runner. `token_budget` is the maximum number of tokens of one iteration. `depth`
    iterations are in flight: 2 is asynchronous scheduling. `context_s` is the time that one token of context of a
    decoding request adds to its iteration, beyond the profile, which was measured with almost no context (None: by
    CONTEXT_SHARE).
    """

    slots: int = 256
    token_budget: int = 2048
    block_tokens: int = 16
    device_blocks: int = 1 << 18
    host_blocks: int = 1 << 18
    block_bytes: int = 1 << 20
    link_bytes_s: float = 20e9
    depth: int = 2
    context_s: float | None = None

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks of so many tokens."""
        return -(-tokens // self.block_tokens)


class _Link(OffloadingWorker):
    """Worker of vLLM's connector whose copies only take time."""

    def __init__(self, machine: EngineResources) -> None:
        self.block_s, self.start_s, self.now = machine.block_bytes / machine.link_bytes_s, 0.0, 0.0
        self._free = {True: 0.0, False: 0.0}
        self._jobs: dict[int, tuple[float, int]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, len(src_spec.block_ids), out=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._submit(job_id, len(dst_spec.block_ids), out=False)

    def get_finished(self) -> list[TransferResult]:
        due = [job_id for job_id, (when, _) in self._jobs.items() if when <= self.now]
        return [TransferResult(job_id, True, self._jobs.pop(job_id)[1], 0.0) for job_id in due]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id] = (0.0, self._jobs[job_id][1])

    def next_landing(self) -> float:
        return min((when for when, _ in self._jobs.values()), default=math.inf)

    def _submit(self, job_id: int, blocks: int, *, out: bool) -> bool:
        self._free[out] = max(self.start_s, self._free[out]) + blocks * self.block_s
        self._jobs[job_id] = (self._free[out], blocks)
        return True


class Unreplicated:
    """Layout that vLLM's connector worker asks for."""

    replicated_layout = False


@dataclass(slots=True)
class _Iteration:
    """One iteration in flight, with the tokens that it samples for each request."""

    end_s: float
    output: SchedulerOutput
    sampled: dict[str, list[int]]


class VirtualEngine:
    """One engine. `emit` receives (request, new tokens, whether it has ended) with the clock `now` at that moment."""

    def __init__(
        self,
        profile: IterationProfile,
        settings: SchedulerSettings,
        machine: EngineResources,
        emit: Callable[[str, int, bool], object],
    ) -> None:
        self.profile, self.machine, self.emit = profile, machine, emit
        self.now = 0.0
        given = machine.context_s
        self._context_s = CONTEXT_SHARE * profile.decode(1) if given is None else given
        if settings.profile is None:
            settings = replace(settings, profile=profile.encode())
        scheduler = PolicyScheduler if settings.policy == MLFQ else AsyncScheduler
        self._deadlines = None
        if settings.policy == DEADLINE:
            self._deadlines = settings.deadlines(machine.device_blocks * machine.block_tokens)
        self.scheduler = create_scheduler(scheduler, configure(machine, settings))
        self.scheduler.clock = lambda: self.now
        self._flight: deque[_Iteration] = deque()
        self._context: dict[str, int] = {}
        self._busy_until, self._empty = 0.0, 0
        self._link, self._worker = _Link(machine), None
        if self.scheduler.connector is not None:
            self._worker = OffloadingConnectorWorker(
                Unreplicated(), self.scheduler.vllm_config, self.scheduler.kv_cache_config
            )
            self._worker.worker = self._link

    def add(self, name: str, prompt: Sequence[int], output: int) -> None:
        """Add a request with `output` tokens. Raises ValueError if its KV never fits the device."""
        needed = self.machine.blocks(len(prompt) + output)
        if needed > self.machine.device_blocks:
            raise ValueError(
                f"request {name} needs {needed} KV blocks, more KV blocks than the device's {self.machine.device_blocks}"
            )
        self._context[name] = len(prompt)
        priority = 0 if self._deadlines is None else self._deadlines.priority(self.now, prompt)
        self.scheduler.add_request(
            make_request(name, list(prompt), output, self.machine.block_tokens, priority)
        )

    @property
    def idle(self) -> bool:
        """Return whether no iteration is in flight."""
        return not self._flight

    def step(self, now: float) -> float:
        """Deliver the iterations that have ended and schedule the next one.

        Returns when to call again; infinity if nothing happens before the next request.
        """
        self.now = now
        while self._flight and self._flight[0].end_s <= now:
            self._deliver(self._flight.popleft())
        if not self.scheduler.has_requests():
            return math.inf
        self._flight.append(self._execute(self.scheduler.schedule()))
        if self._flight[-1].sampled:
            self._empty = 0
            return now if len(self._flight) < self.machine.depth else self._flight[0].end_s
        if len(self._flight) > 1:
            return self._flight[0].end_s
        self._deliver(self._flight.popleft())
        self._empty = (self._empty + 1) % MOST_EMPTY
        return now if self._empty else self._link.next_landing()

    def _execute(self, output: SchedulerOutput) -> _Iteration:
        start_s = max(self.now, self._busy_until)
        if self._worker is not None:
            meta, self._link.start_s = output.kv_connector_metadata, start_s
            self._worker.handle_preemptions(meta)
            self._worker.start_kv_transfers(meta)
            self._worker.prepare_store_kv(meta)
        tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._busy_until = start_s + self._seconds(tokens, starts)
        sampled = {name: self._sample(name, starts[name] + tokens[name]) for name in tokens}
        return _Iteration(self._busy_until, output, sampled)

    def _seconds(self, tokens: dict[str, int], starts: dict[str, int]) -> float:
        if not starts:
            return 0.0
        prompts = {name: self.scheduler.requests[name].num_prompt_tokens for name in tokens}
        decoding = [n for n, t in tokens.items() if t == 1 and self._context[n] > prompts[n]]
        prefill = sum(tokens.values()) - len(decoding)
        context = self._context_s * sum(starts[name] for name in decoding)
        return self.profile.iteration_s(prefill, len(decoding)) + context

    def _sample(self, name: str, computed: int) -> list[int]:
        if computed < self._context[name]:
            return []
        self._context[name] += 1
        return [self._context[name] * 17 % 991]

    def _deliver(self, done: _Iteration) -> None:
        names, transfers = list(done.sampled), None
        if self._worker is not None:
            self._link.now = self.now
            sending, receiving = self._worker.get_finished(done.output.finished_req_ids)
            transfers = KVConnectorOutput(
                finished_sending=sending,
                finished_recving=receiving,
                kv_connector_worker_meta=self._worker.build_connector_worker_meta(),
            )
        report = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(done.sampled.values()),
            kv_connector_output=transfers,
        )
        for of_client in self.scheduler.update_from_output(done.output, report).values():
            for one in of_client.outputs:
                self.emit(one.request_id, len(one.new_token_ids), one.finish_reason is not None)


def make_request(name: str, prompt: list[int], output: int, block_tokens: int, priority: int = 0) -> Request:
    """Return a request of vLLM's engine for `output` tokens."""
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    hasher = get_request_block_hasher(block_tokens, sha256)
    return Request(name, prompt, params, None, priority=priority, block_hasher=hasher)


def configure(machine: EngineResources, settings: SchedulerSettings) -> VllmConfig:
    """Return the configuration of a server with these settings."""
    config = _copy(
        _base_config(settings.kv_strategy != "recompute" and machine.host_blocks > 0, settings.policy == MLFQ)
    )
    config.scheduler_config.async_scheduling = machine.depth > 1
    config.scheduler_config.policy = "priority" if settings.policy == DEADLINE else "fcfs"
    config.scheduler_config.max_num_seqs = machine.slots
    config.scheduler_config.max_num_active_seqs = min(settings.batch or machine.slots, machine.slots)
    config.scheduler_config.max_num_batched_tokens = machine.token_budget
    config.scheduler_config.max_num_scheduled_tokens = machine.token_budget
    config.cache_config.num_gpu_blocks = machine.device_blocks + 1
    config.cache_config.block_size = machine.block_tokens
    config.additional_config = settings.additional_config()
    if config.kv_transfer_config is not None:
        host_bytes = machine.host_blocks * HOST_BLOCK_BYTES
        config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"] = host_bytes
    return config


def create_scheduler(scheduler: type[AsyncScheduler], config: VllmConfig) -> AsyncScheduler:
    """Return a scheduler for a model with one layer of attention."""
    init_none_hash(sha256)
    block = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        log_stats=True,
    )


def _copy(base: VllmConfig) -> VllmConfig:
    """Return a configuration whose numbers may be changed. The model is shared, because no engine changes it."""
    config = copy(base)
    config.scheduler_config, config.cache_config = copy(base.scheduler_config), copy(base.cache_config)
    config.parallel_config = copy(base.parallel_config)
    if (transfer := base.kv_transfer_config) is not None:
        config.kv_transfer_config = replace(
            transfer, kv_connector_extra_config=dict(transfer.kv_connector_extra_config)
        )
    return config


@lru_cache
def _base_config(connected: bool, evicts: bool) -> VllmConfig:
    """Return the configuration that engines copy: creating one takes half a second."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0)
        scheduler = SchedulerConfig(
            max_model_len=MODEL_LENGTH,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=True,
        )
        transfer = kv_transfer_config(HOST_BLOCK_BYTES, on_cpu=True, evicts=evicts)
        return VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(**transfer) if connected else None,
        )
