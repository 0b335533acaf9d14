"""Names that the scheduler and the KV copies on the host stand on."""

from __future__ import annotations

from coldstart.vllm.seams.seam import seam

_KV = "v1.kv_offload"
_CONNECTOR = "distributed.kv_transfer.kv_connector.v1"

SCHEDULER = (
    seam("scheduler", "v1.core.sched.async_scheduler:AsyncScheduler",
          calls=("_request_blocks_can_be_freed(self, request)", "_request_remaining_blocks(self, request)",
                 "_inflight_prefill_reserved_blocks(self)",
                 "_preempt_request(self, request, timestamp, *, drop_stale_output)"),
          overrides=("__init__(self, *args, **kwargs)", "add_request(self, request)",
                     "schedule(self, throttle_prefills)",
                     "update_from_output(self, scheduler_output, model_runner_output)",
                     "_free_request(self, request, *args, **kwargs)",
                     "_preempt_request(self, request, *args, **kwargs)"),
          reads="running waiting kv_holding_waiting max_num_active_reqs max_num_running_reqs "
                "max_num_scheduled_tokens finished_recving_kv_req_ids num_waiting_for_streaming_input "
                "kv_cache_manager kv_cache_config block_size requests connector vllm_config "
                "parallel_config num_spec_tokens requires_kv_delivery"),
    seam("scheduler", "v1.core.sched.scheduler:Scheduler",
         says=("self.current_step < request.next_decode_eligible_step", "self.deferred_waiting",
               "self.reset_preempted_req_ids", "def _update_waiting_for_remote_kv(self, request: Request)",
               "request_queue = self.kv_holding_waiting")),
    seam("scheduler", "v1.request:Request",
          reads="request_id status priority max_tokens num_tokens num_prompt_tokens num_output_tokens num_computed_tokens "
                "next_decode_eligible_step num_output_placeholders num_stale_output_tokens drop_stale_output "
                "is_prefill_chunk structured_output_request resumable sampling_params lora_request block_hashes"),
    seam("scheduler", "sampling_params:SamplingParams", reads="extra_args"),
    seam("scheduler", "lora.request:LoRARequest", reads="lora_name"),
    seam("scheduler", "v1.request:RequestStatus",
          reads="RUNNING PREEMPTED FINISHED_ABORTED FINISHED_ERROR WAITING_FOR_REMOTE_KVS "
                "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_STREAMING_REQ"),
    seam("scheduler", "v1.structured_output.request:StructuredOutputRequest", reads="grammar"),
    seam("scheduler", "v1.core.sched.output:SchedulerOutput",
          reads="num_scheduled_tokens kv_connector_metadata"),
    seam("scheduler", "v1.core.sched.request_queue:RequestQueue",
          overrides=("add_request(self, request)", "prepend_request(self, request)",
                     "prepend_requests(self, requests)", "pop_request(self)", "peek_request(self)",
                     "remove_request(self, request)", "remove_requests(self, requests)", "__bool__(self)",
                     "__len__(self)", "__iter__(self)")),
    seam("scheduler", "v1.core.sched.request_queue:FCFSRequestQueue",
         overrides=("__bool__(self)", "__len__(self)"), says=("class FCFSRequestQueue(deque[Request], RequestQueue)",)),
    seam("scheduler", "v1.core.kv_cache_manager:KVCacheManager",
          calls=("get_computed_blocks(self, request)", "get_blocks(self, request_id)"),
          reads="block_pool watermark_blocks"),
    seam("scheduler", "v1.core.kv_cache_manager:KVCacheBlocks", reads="blocks"),
    seam("scheduler", "v1.core.block_pool:BlockPool", calls=("get_num_free_blocks(self)",), reads="num_gpu_blocks"),
    seam("scheduler", "v1.core.kv_cache_utils:KVCacheBlock", reads="block_id ref_cnt is_null"),
    seam("scheduler", "v1.kv_cache_interface:KVCacheConfig", reads="kv_cache_groups"),
    seam("scheduler", "v1.kv_cache_interface:KVCacheGroupSpec", reads="layer_names kv_cache_spec"),
    seam("scheduler", "v1.kv_cache_interface:KVCacheSpec", reads="page_size_bytes"),
    seam("scheduler", "v1.kv_cache_interface:FullAttentionSpec"),
    seam("scheduler", "v1.outputs:ModelRunnerOutput", reads="kv_connector_output"),
    seam("scheduler", "v1.outputs:KVConnectorOutput", reads="kv_connector_worker_meta finished_recving"),
)  # fmt: skip

OFFLOAD = (
    seam("offload", "config.kv_transfer:KVTransferConfig", reads="kv_connector_extra_config"),
    seam("offload", f"{_CONNECTOR}.offloading_connector:OffloadingConnector",
          calls=("get_num_new_matched_tokens(self, request, num_computed_tokens)",), reads="connector_scheduler"),
    seam("offload", f"{_CONNECTOR}.offloading.scheduler:OffloadingConnectorScheduler", reads="manager"),
    seam("offload", f"{_CONNECTOR}.offloading.common:OffloadingConnectorMetadata", reads="store_jobs load_jobs"),
    seam("offload", f"{_CONNECTOR}.offloading.common:TransferJob", reads="req_id src_spec dst_spec"),
    seam("offload", f"{_CONNECTOR}.offloading.common:OffloadingWorkerMetadata", reads="transfer_stats"),
    seam("offload", f"{_CONNECTOR}.offloading.common:TransferStats", reads="store load"),
    seam("offload", f"{_KV}.cpu.manager:CPUOffloadingManager", reads="_policy"),
    seam("offload", f"{_KV}.base:OffloadKey"),
    seam("offload", f"{_KV}.base:ReqContext", reads="req_id"),
    seam("offload", f"{_KV}.base:LoadStoreSpec"),
    seam("offload", f"{_KV}.base:BlockIDsLoadStoreSpec", reads="block_ids"),
    seam("offload", f"{_KV}.base:GPULoadStoreSpec", reads="block_ids group_sizes"),
    seam("offload", f"{_KV}.base:CanonicalKVCaches", reads="tensors group_data_refs"),
    seam("offload", f"{_KV}.base:CanonicalKVCacheTensor", reads="tensor page_size_bytes"),
    seam("offload", f"{_KV}.base:CanonicalKVCacheRef", reads="tensor_idx"),
    seam("offload", f"{_KV}.base:TransferResult",
          "TransferResult(job_id, success, transfer_size, transfer_time)"),
    seam("offload", f"{_KV}.base:OffloadingWorker",
          overrides=("submit_store(self, job_id, src_spec, dst_spec)",
                     "submit_load(self, job_id, src_spec, dst_spec)", "get_finished(self)",
                     "wait(self, job_ids)", "shutdown(self)")),
    seam("offload", f"{_KV}.config:OffloadingConfig"),
    seam("offload", f"{_KV}.cpu.spec:CPUOffloadingSpec",
          overrides=("__init__(self, config)", "get_worker(self, kv_caches)"), reads="blocks_per_chunk num_chunks"),
    seam("offload", f"{_KV}.cpu.policies.base:ChunkStatus"),
    seam("offload", f"{_KV}.cpu.policies.lru:LRUCachePolicy",
          calls=("_push_evictable(self, key)", "_maybe_compact_heap(self)"),
          overrides=("__init__(self, cache_capacity)", "insert(self, key, chunk)", "touch(self, keys, req_context)",
                     "on_request_finished(self, key_groups, insertion_only_keys, reused_keys, req_context)",
                     "clear(self)", "_assign_new_rank(self, key)"),
          reads="_ranks _evictable", says=("self._ranks: dict[OffloadKey, int]",)),
)  # fmt: skip
