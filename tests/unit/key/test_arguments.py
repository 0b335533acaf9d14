"""Every spelling that vLLM treats as equal parses to the same mapping."""

import pytest

from coldstart.contract.arguments import parse


@pytest.mark.parametrize(
    "spelling",
    [
        ["--max-model-len", "512"],
        ["--max-model-len=512"],
        ["--max_model_len", "512"],
        ["--max_model_len=512"],
        ["--max-model-len", "9", "--max-model-len", "512"],
    ],
)
def test_spellings_of_a_value_are_equal(spelling: list[str]) -> None:
    assert parse(spelling) == {"max_model_len": 512}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["-O3"], {"optimization_level": 3}),
        (["-O", "3"], {"optimization_level": 3}),
        (["-O=3"], {"optimization_level": 3}),
        (["--max-model-len", "1k"], {"max_model_len": 1000}),
        (["--max-model-len", "1K"], {"max_model_len": 1024}),
        (["--max-num-batched-tokens", "25.6k"], {"max_num_batched_tokens": 25600}),
        (["--seed", "-1"], {"seed": -1}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--device-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--cudagraph-capture-sizes", "1", "2", "4"], {"cudagraph_capture_sizes": [1, 2, 4]}),
        (["-cc.mode=3", "-cc.a.b", "x"], {"compilation_config": {"mode": 3, "a": {"b": "x"}}}),
        (["--compilation-config", '{"mode": 3}'], {"compilation_config": {"mode": 3}}),
        (["--compilation-config", "{broken"], {"compilation_config": "{broken"}),
        (["--revision", "007"], {"revision": "007"}),
        (["--new-flag-of-tomorrow", "x"], {"new_flag_of_tomorrow": "x"}),
        ([], {}),
    ],
)
def test_parse_returns_values_of_each_form(argv: list[str], expected: dict[str, object]) -> None:
    assert parse(argv) == expected


def test_dotted_names_replace_a_json_value_as_in_vllm() -> None:
    argv = ["-cc.backend=b", "--compilation-config", '{"mode": 3}']
    assert parse(argv) == {"compilation_config": {"backend": "b"}}
