"""Names where graphs and the KV plan take hold of the GPU's runners."""

from __future__ import annotations

from coldstart.vllm.seams.seam import seam

_GRAPH = "v1.worker.gpu.cudagraph_utils"
_RUNNER = "v1.worker.gpu_model_runner"
_NEW_RUNNER = "v1.worker.gpu.model_runner"

GRAPHS = (
    seam("graphs", "compilation.cuda_graph:CUDAGraphWrapper",
          reads="concrete_cudagraph_entries is_debugging_mode graph_pool unwrap"),
    seam("graphs", "compilation.cuda_graph:CUDAGraphWrapper.__call__", says=("entry.cudagraph.replay()",)),
    seam("graphs", "compilation.cuda_graph:CUDAGraphEntry",
          "CUDAGraphEntry(*, batch_descriptor, cudagraph, output, input_addresses)",
          reads="batch_descriptor cudagraph output input_addresses"),
    seam("graphs", "model_executor.layers.attention.attention:Attention", reads="kv_cache"),
    seam("graphs", "v1.cudagraph_dispatcher:CudagraphDispatcher", reads="cudagraph_keys"),
    seam("graphs", f"{_GRAPH}:CudaGraphManager",
          calls=("capture(self, create_forward_fn, progress_bar_desc)",),
          reads="_candidates _capture_descs graphs _max_full_descs_to_capture pool"),
    seam("graphs", f"{_GRAPH}:CudaGraphManager.run_fullgraph", "run_fullgraph(self, desc)",
         says=("self.graphs[desc].replay()",)),
    seam("graphs", f"{_GRAPH}:CudaGraphManager.dispatch", says=("self._candidates",)),
    seam("graphs", f"{_GRAPH}:ModelCudaGraphManager.capture", "capture(self, model, model_state, input_buffers, *args)",
          says=("self.hidden_states is None",)),
    seam("graphs", f"{_GRAPH}:BatchExecutionDescriptor", reads="num_tokens cg_mode"),
    seam("graphs", _RUNNER),
    seam("graphs", f"{_RUNNER}:GPUModelRunner",
          calls=("_warmup_and_capture(self, desc, cudagraph_runtime_mode)", "capture_model(self)", "load_model(self)"),
          reads="execute_model cudagraph_dispatcher model compilation_config model_config parallel_config"),
    seam("graphs", _NEW_RUNNER),
    seam("graphs", f"{_NEW_RUNNER}:GPUModelRunner",
          calls=("capture_model(self, *, profile_only)", "load_model(self)"),
          reads="cudagraph_manager execute_model model"),
    seam("graphs kv-plan aot", "v1.worker.gpu_worker"),
    seam("graphs kv-plan", "v1.worker.gpu_worker:Worker", reads="vllm_config rank parallel_config init_snapshot"),
    seam("kv-plan", "v1.worker.gpu_worker:maybe_apply_startup_plan", "maybe_apply_startup_plan(worker)"),
    seam("kv-plan", "v1.worker.gpu_worker:Worker", reads="cache_config"),
    seam("kv-plan", "v1.worker.gpu_worker:maybe_save_startup_plan",
         "maybe_save_startup_plan(worker, kv_cache_memory_bytes)"),
    seam("kv-plan", "v1.worker.startup_plan"),
    seam("kv-plan", "v1.worker.startup_plan:_plan_path", "_plan_path(fingerprint)"),
    seam("kv-plan", "v1.worker.startup_plan:compute_plan_fingerprint",
          "compute_plan_fingerprint(vllm_config, rank, world_size)"),
    seam("kv-plan offline", "v1.worker.startup_plan:maybe_save_startup_plan",
          "maybe_save_startup_plan(worker, kv_cache_memory_bytes)", says=("free_memory_baseline",)),
    seam("kv-plan", "utils.mem_utils:MemorySnapshot", reads="free_memory"),
)  # fmt: skip
