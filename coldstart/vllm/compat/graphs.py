"""Names that CUDA graphs and the KV plan use in the GPU's runners and workers."""

from __future__ import annotations

from coldstart.vllm.compat.points import point

_GRAPH = "v1.worker.gpu.cudagraph_utils"
_RUNNER = "v1.worker.gpu_model_runner"
_NEW_RUNNER = "v1.worker.gpu.model_runner"

POINTS = (
    point("graphs", "compilation.cuda_graph:CUDAGraphWrapper",
          reads="concrete_cudagraph_entries is_debugging_mode graph_pool unwrap"),
    point("graphs", "compilation.cuda_graph:CUDAGraphWrapper.__call__", source=("entry.cudagraph.replay()",)),
    point("graphs", "compilation.cuda_graph:CUDAGraphEntry",
          "CUDAGraphEntry(*, batch_descriptor, cudagraph, output, input_addresses)",
          reads="batch_descriptor cudagraph output input_addresses"),
    point("graphs", "model_executor.layers.attention.attention:Attention", reads="kv_cache"),
    point("graphs", "v1.cudagraph_dispatcher:CudagraphDispatcher", reads="cudagraph_keys"),
    point("graphs", f"{_GRAPH}:CudaGraphManager", "capture(create_forward_fn, progress_bar_desc)",
          reads="_candidates _capture_descs graphs _max_full_descs_to_capture pool"),
    point("graphs", f"{_GRAPH}:CudaGraphManager.run_fullgraph", "run_fullgraph(desc)",
          source=("self.graphs[desc].replay()",)),
    point("graphs", f"{_GRAPH}:CudaGraphManager.dispatch", source=("self._candidates",)),
    point("graphs", f"{_GRAPH}:ModelCudaGraphManager.capture", "capture(model, model_state, input_buffers, *args)",
          source=("self.hidden_states is None", "self.aux_hidden_states[i][:num_tokens] = aux")),
    point("graphs", f"{_GRAPH}:BatchExecutionDescriptor", reads="num_tokens cg_mode"),
    point("graphs", _RUNNER),
    point("graphs", f"{_RUNNER}:GPUModelRunner", "_warmup_and_capture(desc, cudagraph_runtime_mode)",
          "capture_model()", "load_model()",
          reads="execute_model cudagraph_dispatcher model compilation_config model_config parallel_config vllm_config"),
    point("graphs", "config.vllm:VllmConfig", reads="use_cumem_cudagraph_pool"),
    point("graphs", _NEW_RUNNER),
    point("graphs", f"{_NEW_RUNNER}:GPUModelRunner", "capture_model(*, profile_only)", "load_model()",
          reads="cudagraph_manager execute_model model vllm_config"),
    point("collector", f"{_RUNNER}:GPUModelRunner", reads="_freeze_gc"),
    point("collector", f"{_NEW_RUNNER}:freeze_gc_for_cudagraph_capture"),
    point("graphs kv-plan aot", "v1.worker.gpu_worker"),
    point("graphs kv-plan", "v1.worker.gpu_worker:Worker", reads="vllm_config rank parallel_config init_snapshot"),
    point("kv-plan", "v1.worker.gpu_worker:maybe_apply_startup_plan", "maybe_apply_startup_plan(worker)"),
    point("kv-plan", "v1.worker.gpu_worker:Worker", reads="cache_config"),
    point("kv-plan", "v1.worker.gpu_worker:maybe_save_startup_plan",
          "maybe_save_startup_plan(worker, kv_cache_memory_bytes)"),
    point("kv-plan", "v1.worker.startup_plan"),
    point("kv-plan", "v1.worker.startup_plan:_plan_path", "_plan_path(fingerprint)"),
    point("kv-plan", "v1.worker.startup_plan:compute_plan_fingerprint",
          "compute_plan_fingerprint(vllm_config, rank, world_size)"),
    point("kv-plan offline", "v1.worker.startup_plan:maybe_save_startup_plan",
          "maybe_save_startup_plan(worker, kv_cache_memory_bytes)", source=("free_memory_baseline",)),
    point("kv-plan", "utils.mem_utils:MemorySnapshot", reads="free_memory"),
)  # fmt: skip
