"""Names for starting an engine: the API server, its configuration, the worker, the offline run, the loader."""

from __future__ import annotations

from coldstart.vllm.seams.seam import seam

_LAUNCHERS = "entrypoints.launchers"

START = (
    seam("start", f"{_LAUNCHERS}.api_server.entry:build_and_serve",
          "build_and_serve(engine_client, listen_address, sock, args, *, callback_notify)"),
    seam("start", f"{_LAUNCHERS}.api_server.entry"),
    seam("start", f"{_LAUNCHERS}.app:build_app", "build_app(args, supported_tasks, model_config)"),
    seam("start", f"{_LAUNCHERS}.launcher:setup_server", "setup_server(args, *, reuse_port)"),
    seam("start", f"{_LAUNCHERS}.cli_args:make_arg_parser", "make_arg_parser(parser)"),
    seam("start", f"{_LAUNCHERS}.cli_args:validate_parsed_serve_args", "validate_parsed_serve_args(args)"),
    seam("start headless", f"{_LAUNCHERS}.cli_args", says=("--headless", "--api-server-count")),
    seam("start", "utils.argparse_utils:FlexibleArgumentParser", calls=("parse_args(self, args)",)),
    seam("start", "utils.system_utils:decorate_logs", "decorate_logs(process_name, *, skip_if_decorated)"),
    seam("start", "tokenizers:cached_tokenizer_from_config", "cached_tokenizer_from_config(model_config)"),
    seam("start offline kv-plan", "platforms:current_platform"),
    seam("start offline kv-plan", "platforms.interface:Platform",
          calls=("is_cpu(self)", "get_device_name(cls)")),
    seam("start offline", "usage.usage_lib:UsageContext", reads="OPENAI_API_SERVER"),
    seam("start offline", "engine.arg_utils:AsyncEngineArgs",
          calls=("from_cli_args(cls, args)", "create_engine_config(self, *, usage_context)"),
          reads="distributed_executor_backend worker_cls worker_extension_cls load_format scheduler_cls "
                "additional_config kv_transfer_config tensor_parallel_size pipeline_parallel_size data_parallel_size "
                "enable_log_requests aggregate_engine_logging disable_log_stats"),
    seam("start", "v1.engine.core"),
    seam("start", "v1.engine.async_llm"),
    seam("start", "v1.engine.async_llm:AsyncLLM",
          calls=("from_vllm_config(cls, vllm_config, *, usage_context, enable_log_requests, aggregate_engine_logging, "
                 "disable_log_stats)", "generate(self, prompt, sampling_params, request_id)",
                 "get_supported_tasks(self)", "collective_rpc(self, method)", "shutdown(self, *, timeout)"),
          reads="errored"),
    seam("start", "v1.core.sched.scheduler"),
    seam("start", "v1.structured_output"),
    seam("start offline", ":SamplingParams",
          "SamplingParams(*, max_tokens, temperature, ignore_eos, detokenize)"),
    seam("start offline", "inputs:TokensPrompt", "TokensPrompt(*, prompt_token_ids)"),
    seam("start offline", "outputs:RequestOutput", reads="outputs finished"),
    seam("start offline", "outputs:CompletionOutput", reads="token_ids"),
    seam("late-interaction", f"{_LAUNCHERS}.cli_args:propagate_flash_late_interaction",
         "propagate_flash_late_interaction(args, engine_args)", says=("enable_flash_late_interaction",)),
    seam("standby", "v1.engine.async_llm:AsyncLLM",
          calls=("sleep(self, level)", "wake_up(self, *, tags)", "collective_rpc(self, method)"), reads="errored"),
    seam("standby", "v1.worker.gpu_worker:Worker", calls=("reload_weights(self)",)),
    seam("standby", "engine.arg_utils:AsyncEngineArgs", calls=("from_cli_args(cls, args)",)),
    seam("standby", "engine.arg_utils", says=("--enable-sleep-mode",)),
    seam("headless", "entrypoints.cli.serve:run_headless", "run_headless(args)", says=("api_server_count",)),
    seam("stock", "entrypoints.openai.api_server", says=("__main__",)),
    seam("ahead", "platforms:current_platform"),
    seam("ahead", "platforms.interface:Platform", calls=("is_cpu(self)", "register_triton_kernel_overrides(cls)")),
    seam("ahead", "v1.worker.worker_base", says=("current_platform.register_triton_kernel_overrides",)),
    seam("ahead", "compilation.backends"),
    seam("ahead", "model_executor.layers.quantization.online.base"),
)  # fmt: skip

CONFIG = (
    seam("start worker template", "config:VllmConfig",
          reads="load_config model_config logging_config parallel_config kv_transfer_config shutdown_timeout"),
    seam("scheduler offline compile", "config:VllmConfig",
          reads="scheduler_config cache_config parallel_config model_config compilation_config additional_config"),
    seam("start", "config:LoggingConfig", reads="configure_logging pylogging_config_file"),
    seam("start worker weights", "config:LoadConfig", reads="load_format safetensors_load_strategy"),
    seam("start worker offline weights graphs", "config:ModelConfig", calls=("get_vocab_size(self)",),
          reads="architectures runner_type max_model_len hf_config model revision"),
    seam("template scheduler graphs kv-plan offline", "config:ParallelConfig",
          reads="world_size tensor_parallel_size pipeline_parallel_size worker_cls"),
    seam("scheduler offline", "config:SchedulerConfig",
          reads="policy enable_chunked_prefill max_num_batched_tokens max_num_seqs"),
    seam("offline", "config:CacheConfig", reads="num_gpu_blocks block_size"),
    seam("kv-plan", "config:CacheConfig", reads="kv_cache_memory_bytes"),
    seam("compile graphs", "config:CompilationConfig", reads="dynamic_shapes_config static_forward_context"),
    seam("compile", "config.compilation:DynamicShapesConfig", reads="evaluate_guards"),
    seam("compile", "config:set_current_vllm_config", "set_current_vllm_config(vllm_config)"),
    seam("weights", "config:get_current_vllm_config", "get_current_vllm_config()"),
    seam("weights", "config:VllmConfig", reads="speculative_config"),
    seam("weights", "config.utils:replace", "replace(dataclass_instance, *, load_format)"),
)  # fmt: skip

WORKER = (
    seam("worker template", "v1.executor.uniproc_executor:UniProcExecutor",
          calls=("collective_rpc(self, method)",), overrides=("_init_executor(self)",),
          reads="vllm_config driver_worker"),
    seam("worker", "v1.worker.worker_base:WorkerWrapperBase", reads="worker"),
    seam("worker", "utils.ompmultiprocessing:OMPProcessManager", "OMPProcessManager(config)",
          reads="skip_setup cpu_lists"),
    seam("worker", "v1.worker.cpu_worker:CPUWorker",
          overrides=("init_device(self)", "load_model(self, **kwargs)", "determine_available_memory(self)",
                     "_should_warm_up_model(self)", "compile_or_warm_up_model(self)"),
          reads="model_runner vllm_config"),
    seam("worker", "v1.worker.cpu_model_runner:CPUModelRunner", reads="model"),
    seam("worker lazy-kv", "v1.kv_cache_interface:KVCacheConfig", reads="kv_cache_groups"),
    seam("lazy-kv", "v1.worker.cpu_model_runner:CPUModelRunner",
          overrides=("initialize_kv_cache(self, kv_cache_config, is_profiling, kv_cache_allocation_context)",)),
    seam("compile", "v1.worker.cpu_model_runner:CPUModelRunner", calls=("_dummy_run(self, num_tokens)",)),
    seam("compile offline", "compilation.decorators",
          says=("self.aot_compiled_fn", "self.do_not_compile", "self.was_aot_compile_fn_loaded_from_disk",
                "self.vllm_config", "self.compilation_config")),
    seam("aot", "compilation.decorators:_try_load_aot_compiled_fn",
         "_try_load_aot_compiled_fn(model, aot_compilation_path)"),
)  # fmt: skip

OFFLINE = (
    seam("offline", "v1.engine.llm_engine:LLMEngine",
          calls=("from_vllm_config(cls, vllm_config, *, disable_log_stats)",
                 "add_request(self, request_id, prompt, params)", "step(self)", "has_unfinished_requests(self)"),
          reads="engine_core"),
    seam("offline", "v1.engine.core_client:InprocClient", reads="engine_core"),
    seam("offline", "v1.engine.core:EngineCore", reads="model_executor available_gpu_memory_for_kv_cache"),
    seam("offline", "v1.executor.uniproc_executor:UniProcExecutor", reads="driver_worker"),
    seam("offline", "engine.arg_utils", says=("--async-scheduling",)),
    seam("offline kv-plan", ":__version__"),
)  # fmt: skip

WEIGHTS = (
    seam("weights", "model_executor.model_loader"),
    seam("weights", "model_executor.model_loader:register_model_loader", "register_model_loader(load_format)"),
    seam("weights", "model_executor.model_loader.default_loader:DefaultModelLoader",
          calls=("_prepare_weights(self, model_name_or_path, subfolder, revision, fall_back_to_pt, "
                 "allow_patterns_overrides)",),
          overrides=("__init__(self, load_config)", "create_model(self, *args, **kwargs)",
                     "load_model(self, *args, **kwargs)", "download_model(self, model_config)",
                     "load_weights(self, model, model_config)", "get_all_weights(self, model_config, model)"),
          reads="load_config local_expert_ids _encoder_only_lm_prefixes counter_before_loading_weights"),
    seam("weights", "distributed:get_pp_group", "get_pp_group()"),
    seam("weights", "distributed.parallel_state:GroupCoordinator", reads="rank_in_group world_size"),
    seam("weights", "distributed:get_tensor_model_parallel_world_size",
          "get_tensor_model_parallel_world_size()"),
)  # fmt: skip
