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


def test_nested_settings_become_dotted_fields_whatever_their_order() -> None:
    left = engine_fields({"compilation_config": {"mode": 3, "sizes": [1, 2], "inner": {"b": 1, "a": 2}}})
    right = engine_fields({"compilation_config": {"inner": {"a": 2, "b": 1}, "sizes": [1, 2], "mode": 3}})
    assert left == right
    assert left["compilation_config.inner.a"] == 2
    assert left["compilation_config.sizes"] == "[1,2]"


def test_paths_in_nested_settings_are_dropped() -> None:
    assert engine_fields({"compilation_config": {"cache_dir": "x", "mode": 3}}) == {
        "compilation_config.mode": 3
    }


def test_names_that_are_not_valid_fields_stay_one_field() -> None:
    assert engine_fields({"hf_overrides": {"a/b": 1}}) == {"hf_overrides": '{"a/b":1}'}


def test_a_file_counts_by_content(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    here.write_text("same")
    there.write_text("same")
    first = engine_fields({"hf_config_path": str(here)})
    assert first == engine_fields({"hf_config_path": str(there)})
    there.write_text("other")
    assert first != engine_fields({"hf_config_path": str(there)})


def test_odd_names_and_long_values_still_count() -> None:
    odd = engine_fields({"a+b": 1})
    assert odd == {"odd": '{"a+b":1}'}
    short, long = ("x" * size for size in (10, 100_000))
    assert engine_fields({"flag": short}) == {"flag": short}
    assert len(str(engine_fields({"flag": long})["flag"])) < 100
    assert engine_fields({"flag": long}) != engine_fields({"flag": long + "x"})
