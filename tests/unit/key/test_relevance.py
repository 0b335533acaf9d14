"""The key excludes settings of the HTTP server and paths, and includes all unknown settings."""

from pathlib import Path

import pytest

from coldstart.models.relevance import engine_fields


@pytest.mark.parametrize(
    "name",
    ["host", "port", "api_key", "served_model_name", "uvicorn_log_level", "disable_log_stats", "load_format"],
)
def test_server_settings_are_not_in_the_key(name: str) -> None:
    assert engine_fields({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "dtype",
        "tensor_parallel_size",
        "quantization",
        "kv_cache_dtype",
        "block_size",
        "enforce_eager",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "a_flag_of_tomorrow",
    ],
)
def test_engine_settings_are_in_the_key(name: str) -> None:
    assert engine_fields({name: 7}) == {name: 7}


def test_paths_in_nested_settings_are_dropped() -> None:
    assert engine_fields({"compilation_config": {"cache_dir": "x", "mode": 3}}) == {
        "compilation_config.mode": 3
    }


def test_a_file_counts_by_content(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.write_text("same")
    there.write_text("same")
    first = engine_fields({"hf_config_path": str(here)})
    assert first == engine_fields({"hf_config_path": str(there)})
    there.write_text("other")
    assert first != engine_fields({"hf_config_path": str(there)})
