"""Select the vLLM arguments that change the materialized state and therefore enter the bundle key.

The rule is opt-out, like ``compute_hash`` of vLLM's configurations. An argument enters the key unless it is known to
affect only the API server, logging, transport or file locations. A new vLLM flag therefore changes the key: at worst a
bundle is built twice, but no wrong bundle is used.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from coldstart.artifacts.files import open_regular
from coldstart.system import secrets

Scalar = str | int | float | bool | None

_SERVER = """
    host port uds root_path middleware api_key ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers
    enable_ssl_refresh allow_credentials allowed_origins allowed_methods allowed_headers grpc grpc_port
    headless api_server_count h11_max_incomplete_event_size h11_max_header_count sse_keep_alive_interval
    shutdown_timeout disable_fastapi_docs enable_offline_docs enable_request_id_headers fingerprint_mode
    fingerprint_value served_model_name response_role chat_template chat_template_content_format
    default_chat_template_kwargs trust_request_chat_template trust_request_mm_kwargs enable_auto_tool_choice
    tool_call_parser exclude_tools_when_tool_choice_none tool_parser_plugin tool_strict_level tool_server
    reasoning_parser reasoning_parser_plugin return_tokens_as_token_ids enable_prompt_tokens_details
    enable_per_request_metrics enable_server_load_tracking enable_force_include_usage
    enable_tokenizer_info_endpoint tokens_only cohere_is_reasoning_model cohere_format
    anthropic_disabled_thinking_effort lora_modules generation_config override_generation_config max_logprobs
    logprobs_mode stream_interval allowed_local_media_path allowed_media_domains io_processor_plugin
    enable_scale_out data_parallel_supervisor_port dp_supervisor_probe_interval_s
    dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold structured_outputs_config
    reasoning_effort_map
"""
_LOGS = """
    log_level log_config_file logging_config uvicorn_log_level disable_uvicorn_access_log
    disable_access_log_for_endpoints disable_log_stats enable_log_requests enable_log_outputs
    enable_log_deltas log_error_stack max_log_len aggregate_engine_logging otlp_traces_endpoint
    collect_detailed_traces show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample
    cudagraph_metrics custom_histogram_buckets per_request_spec_decode_metrics enable_mfu_metrics
    enable_logging_iteration_details enable_layerwise_nvtx_tracing jit_monitor_mode jit_monitor_verbose
    profiler_config watchdog_config use_tqdm_on_load fail_on_environ_validation kv_events_config
"""
# How processes find each other, file locations, and the transport of weights and KV, but not their content.
_TRANSPORT = """
    distributed_executor_backend worker_cls worker_extension_cls master_addr master_port nnodes node_rank
    distributed_timeout_seconds cpu_distributed_timeout_seconds data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
    data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
    numa_bind numa_bind_nodes numa_bind_cpus device_ids ray_workers_use_nsight max_parallel_loading_workers
    disable_custom_all_reduce enable_shm_tensor_arena
    hf_token download_dir load_format safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size model_loader_extra_config ignore_patterns pt_load_map_location
    weight_transfer_config kv_transfer_config
"""
# Order and admission of requests: run-time policy of the scheduler with the same kernels and the same memory.
_POLICY = """
    scheduling_policy max_num_queued_reqs max_num_queued_tokens long_prefill_token_threshold
    long_prefill_token_threshold_adaptive prefill_schedule_interval scheduler_cls async_scheduling seed
    prefix_caching_hash_algo prefix_cache_retention_interval
"""
# The model itself is in the model.* fields.
_MODEL = "model model_tag positional revision served_model"

IGNORED = frozenset(" ".join((_SERVER, _LOGS, _TRANSPORT, _POLICY, _MODEL)).split())
# An explicit default has the same effect as none. The table has only defaults that no platform changes.
DEFAULTS: Mapping[str, object] = {
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "tokenizer_mode": "auto",
    "quantization": None,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enforce_eager": False,
    "trust_remote_code": False,
    "enable_lora": False,
    "cpu_offload_gb": 0,
}
# Paths in nested settings, which vLLM's own hash omits too.
_PATH_SETTINGS = frozenset({"cache_dir", "local_cache_dir", "debug_dump_path", "download_dir"})
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")
# Names that are not valid key fields are combined in this field, so that they still affect the key.
_UNUSUAL_NAMES = "odd"
# A value that is longer than a field may be is replaced by its digest.
_MAX_VALUE_LENGTH = 1024
_CONTENT = "content@sha256:"
_PATH = re.compile(r"(/|~|\.\.?/|[A-Za-z]:[\\/])")


def select_engine_fields(arguments: Mapping[str, object]) -> dict[str, Scalar]:
    """Return the relevant ``arguments`` as flat key fields, without the ``engine.`` prefix."""
    relevant = {
        name.replace("-", "_"): value for name, value in arguments.items() if _is_relevant(name, value)
    }
    named = {name: value for name, value in relevant.items() if _NAME.fullmatch(name)}
    unusual = {name: value for name, value in relevant.items() if name not in named}
    fields = [_flatten(name, value) for name, value in named.items()]
    if unusual:
        fields.append(_as_json(_UNUSUAL_NAMES, unusual))
    return {name: value for part in fields for name, value in part.items()}


def _is_relevant(name: str, value: object) -> bool:
    plain = name.replace("-", "_")
    return (
        plain not in IGNORED
        and not secrets.is_secret_name(plain)
        and not (plain in DEFAULTS and DEFAULTS[plain] == value)
    )


def _is_excluded(member: str) -> bool:
    # A key is published with its bundle, and secrets do not change compiled code.
    return member in _PATH_SETTINGS or secrets.is_secret_name(member)


def _flatten(name: str, value: object) -> dict[str, Scalar]:
    if not isinstance(value, Mapping | list | tuple):
        return {name: _without_path(value)}
    if not isinstance(value, Mapping) or not value or not all(_NAME.fullmatch(str(key)) for key in value):
        return _as_json(name, value)
    inner = [_flatten(f"{name}.{key}", item) for key, item in value.items() if not _is_excluded(str(key))]
    return {key: item for fields in inner for key, item in fields.items()}


def _as_json(name: str, value: object) -> dict[str, Scalar]:
    text = json.dumps(_without_paths(value), sort_keys=True, separators=(",", ":"))
    return {name: text if len(text) <= _MAX_VALUE_LENGTH else _digest(text.encode())}


def _without_paths(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _without_paths(v) for k, v in value.items() if not _is_excluded(str(k))}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_paths(item) for item in value]
    return _without_path(value)


def _without_path(value: object) -> Scalar:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    if len(text) > _MAX_VALUE_LENGTH:
        return _digest(text.encode())
    return _digest_path(text) if _PATH.match(text) else text


def _digest_path(path: str) -> str:
    """Return the digest of the file `path`, of config.json in the directory `path` or, without these files, of the path."""
    location = Path(path)
    config = location / "config.json"
    file = config if config.is_file() else location
    if not file.is_file():
        return _digest(path.encode())
    with open_regular(file) as content:
        return f"{_CONTENT}{hashlib.file_digest(content, 'sha256').hexdigest()}"


def _digest(data: bytes) -> str:
    return f"{_CONTENT}{hashlib.sha256(data).hexdigest()}"
