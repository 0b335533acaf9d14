"""Simulated engine: vLLM's own scheduler and KV connector on a virtual clock, without a model, worker or device.

Equation: an iteration takes profile.predict_iteration_s(prefill tokens, decoding requests) + context_s * context tokens of the
decoding requests. The link to host memory carries one transfer at a time in each direction. Generated tokens are arbitrary.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
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
"""Size of one KV block of MODEL in host memory, in bytes."""
MAX_EMPTY_ITERATIONS = 8
"""Number of consecutive empty iterations after which the engine waits; a decision may need the output of the last one."""


@dataclass(frozen=True, slots=True)
class EngineResources:
    """Resources of the simulated engine, in blocks, bytes and seconds.

    `max_running_requests` is the number of slots in the model runner. `token_budget` is the maximum number of tokens per
    iteration. `iterations_in_flight` is 2 with asynchronous scheduling. `context_s` is the time that each context token
    of a decoding request adds to an iteration, because profiles are measured with short contexts (None: from
    CONTEXT_SHARE).
    """

    max_running_requests: int = 256
    token_budget: int = 2048
    block_tokens: int = 16
    device_blocks: int = 1 << 18
    host_blocks: int = 1 << 18
    block_bytes: int = 1 << 20
    link_bytes_s: float = 20e9
    iterations_in_flight: int = 2
    context_s: float | None = None

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_tokens)


class _SimulatedLink(OffloadingWorker):
    """Offloading worker that simulates the duration of copies without copying."""

    def __init__(self, resources: EngineResources) -> None:
        self.block_s, self.start_s, self.now = resources.block_bytes / resources.link_bytes_s, 0.0, 0.0
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

    def next_completion_s(self) -> float:
        return min((when for when, _ in self._jobs.values()), default=math.inf)

    def _submit(self, job_id: int, blocks: int, *, out: bool) -> bool:
        self._free[out] = max(self.start_s, self._free[out]) + blocks * self.block_s
        self._jobs[job_id] = (self._free[out], blocks)
        return True


class UnreplicatedLayout:
    """Description of the KV layout that vLLM's connector worker requires."""

    replicated_layout = False


@dataclass(slots=True)
class _Iteration:
    """Iteration in flight, with the tokens sampled for each request."""

    end_s: float
    output: SchedulerOutput
    sampled: dict[str, list[int]]


class VirtualEngine:
    """Simulated engine. It calls `emit` with a request ID, the number of new tokens, and whether the request has ended."""

    def __init__(
        self,
        profile: IterationProfile,
        settings: SchedulerSettings,
        resources: EngineResources,
        emit: Callable[[str, int, bool], object],
    ) -> None:
        self.profile, self.resources, self.emit = profile, resources, emit
        self.now = 0.0
        context_s = resources.context_s
        self._context_s = CONTEXT_SHARE * profile.decode(1) if context_s is None else context_s
        if settings.profile is None:
            settings = replace(settings, profile=profile.encode())
        scheduler = PolicyScheduler if settings.policy == MLFQ else AsyncScheduler
        self._deadlines = None
        if settings.policy == DEADLINE:
            self._deadlines = settings.create_deadline_policy(
                resources.device_blocks * resources.block_tokens
            )
        self.scheduler = create_scheduler(scheduler, create_config(resources, settings))
        self.scheduler.clock = lambda: self.now
        self._iterations_in_flight: deque[_Iteration] = deque()
        self._context: dict[str, int] = {}
        self._busy_until, self._empty_iterations = 0.0, 0
        self._link, self._worker = _SimulatedLink(resources), None
        if self.scheduler.connector is not None:
            self._worker = OffloadingConnectorWorker(
                UnreplicatedLayout(), self.scheduler.vllm_config, self.scheduler.kv_cache_config
            )
            self._worker.worker = self._link

    def add_request(self, name: str, prompt: Sequence[int], output: int) -> None:
        """Add a request that generates `output` tokens. Raises ValueError if its KV cannot fit on the device."""
        needed_blocks = self.resources.blocks(len(prompt) + output)
        if needed_blocks > self.resources.device_blocks:
            raise ValueError(
                f"request {name} needs {needed_blocks} KV blocks, but the device has {self.resources.device_blocks}"
            )
        self._context[name] = len(prompt)
        priority = 0 if self._deadlines is None else self._deadlines.priority(self.now, prompt)
        self.scheduler.add_request(
            make_request(name, list(prompt), output, self.resources.block_tokens, priority)
        )

    @property
    def is_idle(self) -> bool:
        """Return whether no iteration is in flight."""
        return not self._iterations_in_flight

    def step(self, now: float) -> float:
        """Deliver the results of the iterations that have ended, and schedule the next iteration.

        Returns:
            The time in seconds at which to call `step` again, or infinity if no call is needed before the next request arrives.
        """
        self.now = now
        while self._iterations_in_flight and self._iterations_in_flight[0].end_s <= now:
            self._deliver(self._iterations_in_flight.popleft())
        if not self.scheduler.has_requests():
            return math.inf
        self._iterations_in_flight.append(self._execute(self.scheduler.schedule()))
        if self._iterations_in_flight[-1].sampled:
            self._empty_iterations = 0
            if len(self._iterations_in_flight) < self.resources.iterations_in_flight:
                return now
            return self._iterations_in_flight[0].end_s
        if len(self._iterations_in_flight) > 1:
            return self._iterations_in_flight[0].end_s
        self._deliver(self._iterations_in_flight.popleft())
        self._empty_iterations = (self._empty_iterations + 1) % MAX_EMPTY_ITERATIONS
        return now if self._empty_iterations else self._link.next_completion_s()

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
        self._busy_until = start_s + self._iteration_seconds(tokens, starts)
        sampled = {name: self._sample(name, starts[name] + tokens[name]) for name in tokens}
        return _Iteration(self._busy_until, output, sampled)

    def _iteration_seconds(self, tokens: dict[str, int], starts: dict[str, int]) -> float:
        if not starts:
            return 0.0
        prompts = {name: self.scheduler.requests[name].num_prompt_tokens for name in tokens}
        decoding = [n for n, t in tokens.items() if t == 1 and self._context[n] > prompts[n]]
        prefill = sum(tokens.values()) - len(decoding)
        context = self._context_s * sum(starts[name] for name in decoding)
        return self.profile.predict_iteration_s(prefill, len(decoding)) + context

    def _sample(self, name: str, computed: int) -> list[int]:
        if computed < self._context[name]:
            return []
        self._context[name] += 1
        return [self._context[name] * 17 % 991]

    def _deliver(self, iteration: _Iteration) -> None:
        names, transfers = list(iteration.sampled), None
        if self._worker is not None:
            self._link.now = self.now
            sending, receiving = self._worker.get_finished(iteration.output.finished_req_ids)
            transfers = KVConnectorOutput(
                finished_sending=sending,
                finished_recving=receiving,
                kv_connector_worker_meta=self._worker.build_connector_worker_meta(),
            )
        report = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=list(iteration.sampled.values()),
            kv_connector_output=transfers,
        )
        for of_client in self.scheduler.update_from_output(iteration.output, report).values():
            for one in of_client.outputs:
                self.emit(one.request_id, len(one.new_token_ids), one.finish_reason is not None)


def make_request(name: str, prompt: list[int], output: int, block_tokens: int, priority: int = 0) -> Request:
    """Return a vLLM request that generates exactly `output` tokens."""
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
    hasher = get_request_block_hasher(block_tokens, sha256)
    return Request(name, prompt, params, None, priority=priority, block_hasher=hasher)


def create_config(resources: EngineResources, settings: SchedulerSettings) -> VllmConfig:
    """Return the vLLM configuration of the simulated server."""
    base = _base_config(settings.kv_strategy != "recompute" and resources.host_blocks > 0)
    config = deepcopy(base, {id(base.model_config): base.model_config})  # nothing changes the model
    config.scheduler_config.async_scheduling = resources.iterations_in_flight > 1
    config.scheduler_config.policy = "priority" if settings.policy == DEADLINE else "fcfs"
    config.scheduler_config.max_num_seqs = resources.max_running_requests
    config.scheduler_config.max_num_active_seqs = min(
        settings.batch or resources.max_running_requests, resources.max_running_requests
    )
    config.scheduler_config.max_num_batched_tokens = resources.token_budget
    config.scheduler_config.max_num_scheduled_tokens = resources.token_budget
    config.cache_config.num_gpu_blocks = resources.device_blocks + 1
    config.cache_config.block_size = resources.block_tokens
    config.additional_config = settings.build_additional_config()
    if config.kv_transfer_config is not None:
        host_bytes = resources.host_blocks * HOST_BLOCK_BYTES
        config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"] = host_bytes
    return config


def create_scheduler(scheduler: type[AsyncScheduler], config: VllmConfig) -> AsyncScheduler:
    """Return a scheduler for a model with one attention layer."""
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


@lru_cache
def _base_config(connected: bool) -> VllmConfig:
    """Return a cached configuration to copy, because creating one takes half a second."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", seed=0)
        scheduler = SchedulerConfig(
            max_model_len=MODEL_LENGTH,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=True,
        )
        transfer = kv_transfer_config(HOST_BLOCK_BYTES, on_cpu=True)
        return VllmConfig(
            model_config=model,
            scheduler_config=scheduler,
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(**transfer) if connected else None,
        )
