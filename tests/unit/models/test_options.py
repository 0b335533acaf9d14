"""Options of vLLM are checked by name before a key is computed, without an import of vLLM."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.models import inspection, options

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--max-modellen", "--max-model-len"),
        ("--kv_cache_memry=1", "--kv-cache-memory-bytes"),
        ("--enforce-egaer", "--enforce-eager"),
        ("--no-enable-prefix-cachng", "--enable-prefix-caching"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
    ],
)
def test_check_suggests_the_option_when_one_is_misspelt(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match="has no option") as error:
        inspection.look_up("no-such-model", ["--seed", "1", wrong])
    assert error.value.hint is not None and right in error.value.hint


@pytest.mark.parametrize(
    "given",
    [
        ["--max-model-len", "1k", "--enforce-eager", "-tp", "2", "-O3", "--no-enable-prefix-caching"],
        [
            "--max_model_len=512",
            "--compilation-config.mode",
            "3",
            "-cc.mode=3",
            "--hf-overrides",
            '{"a": -1}',
        ],
        [
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k",
            "--uds",
            "/s",
            "--config",
            "c.yaml",
            "--headless",
        ],
        ["--tensor-parallel", "1", "--kv-cache-memory-bytes", "1", "--seed", "-1"],
    ],
)
def test_check_accepts_every_spelling_of_an_option(given: list[str]) -> None:
    options.check(Arguments(given))
    assert "vllm" not in sys.modules or importlib.util.find_spec("vllm") is not None


@pytest.mark.slow
def test_list_options_has_every_option_of_vllms_parser() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    named = [option for action in actions for option in action.option_strings if option.startswith("--")]
    for option in named:
        options.check(Arguments([option]))
    assert len(named) > 200
