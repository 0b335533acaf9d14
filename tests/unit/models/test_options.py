"""Options of vLLM are checked by name before a key is computed, without an import of vLLM."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from coldstart.bench import benchmark
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.models import inspection, option_values, options
from coldstart.system import runtime

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


@pytest.mark.parametrize(
    ("given", "reason", "hint"),
    [
        (
            ["--max-model-len", "abc"],
            "--max-model-len expects a number, found 'abc'",
            "--max-model-len NUMBER",
        ),
        (["--max_model_len=abc"], "--max-model-len expects a number", "--max-model-len NUMBER"),
        (["--max-model-len"], "--max-model-len has no value", "--max-model-len NUMBER"),
        (["--max-model-len", "--enforce-eager"], "--max-model-len has no value", "--max-model-len NUMBER"),
        (["-tp", "two"], "--tensor-parallel-size expects a number", "--tensor-parallel-size NUMBER"),
        (["--dtype", "bogus"], "--dtype does not accept 'bogus'", "choose one of: auto, bfloat16, "),
        (["--dtype"], "--dtype has no value", "--dtype auto|bfloat16|"),
        (["word"], "the word 'word'", "remove it"),
        (["--seed", "1", "word"], "the word 'word'", "remove it"),
        (["--enforce-eager", "word"], "the word 'word'", "remove it"),
    ],
)
def test_check_refuses_a_value_that_vllm_refuses(given: list[str], reason: str, hint: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        inspection.look_up("no-such-model", given)
    assert hint in str(error.value.hint)


def test_choices_of_another_vllm_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "vllm_distribution", lambda: ("vllm", "0.31.2"))
    options.check(Arguments(["--dtype", "new"]))


def test_check_does_nothing_when_vllm_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options.list_options.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    try:
        options.check(Arguments(["--max-modellen"]))
    finally:
        options.list_options.cache_clear()


@pytest.mark.parametrize("place", ["launchers", "common"])
def test_options_of_the_server_are_read_where_each_vllm_has_them(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 moved the file from `launchers` to `common`."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text('add("--seed")\n')
    (tmp_path / "entrypoints" / place).mkdir(parents=True)
    (tmp_path / "entrypoints" / place / "cli_args.py").write_text("class Arguments:\n    root_path: str\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    options.list_options.cache_clear()
    try:
        assert {"seed", "root-path"} <= options.list_options()
    finally:
        options.list_options.cache_clear()


@pytest.mark.slow
def test_list_options_has_every_option_of_vllms_parser() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    named = [option for action in actions for option in action.option_strings if option.startswith("--")]
    for option in named:
        options.check_names(Arguments([option]))
    assert len(named) > 200


@pytest.mark.slow
def test_values_that_vllms_parser_accepts_are_accepted() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = {action.dest: action for action in make_arg_parser(FlexibleArgumentParser())._actions}
    samples = [
        "5",
        "-1",
        "1k",
        "2K",
        "1.5m",
        "1.5M",
        "1_000",
        " 7 ",
        "+3",
        "0.5",
        "1e3",
        "auto",
        "AUTO",
        "None",
        "",
    ]
    for name in option_values.NUMBERS:
        action = actions[name]
        assert action.nargs is None and not _accepts(action.type, "abc")
        accepted = [word for word in samples if _accepts(action.type, word)]
        assert accepted
        for word in accepted:
            option_values.check([f"--{name}={word}"])
    for name in option_values.FLAGS:
        assert actions[name].nargs == 0
    for name, choices in option_values.CHOICES.items():
        assert actions[name].nargs is None and set(actions[name].choices) == set(choices)


def _accepts(convert: Callable[[str], object], word: str) -> bool:
    try:
        convert(word)
    except (ValueError, ArgumentTypeError):
        return False
    return True


def test_bench_checks_options_before_a_download_and_the_first_start() -> None:
    with pytest.raises(UsageError, match="has no option --max-modellen"):
        benchmark.subject(benchmark.BenchRequest("no-such-model", ["--max-modellen", "5"]))
