"""Shell completion of models and of bundles: the right words, no error, and no heavy import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.commands.cli import COMMANDS

from coldstart.system.paths import Cache

HEAVY = ["torch", "vllm", "pandas", "transformers", "numpy", "huggingface_hub", "ray", "rich", "starlette"]
PROBE = """
import sys
from coldstart.commands.cli import main
try:
    main()
finally:
    print(",".join(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""


def complete(line: str, *absent: str) -> list[str]:
    """Return what a shell would offer for the last word of the line; it imports nothing of HEAVY and `absent`."""
    words = line.split(" ")
    variables = {
        "_COLDSTART_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-c", PROBE.format(heavy=[*HEAVY, *absent])]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
    return done.stdout.split()


@pytest.mark.parametrize(
    "command", ["serve", "up", "materialize", "inspect", "validate", "template start", "down"]
)
def test_model_is_completed(command: str, home: Path) -> None:
    assert complete(f"coldstart {command} tiny-l") == ["tiny-llama"]


def test_commands_are_completed_without_importing_one() -> None:
    modules = [module for module, _, _ in COMMANDS.values()]
    assert complete("coldstart ", *modules) == list(COMMANDS)
    assert complete("coldstart tr", *modules) == ["trust", "trace-replay"]
    assert complete("coldstart serve --mod", "coldstart.launch.server_process") == ["--mode"]


@pytest.mark.parametrize("command", ["export", "push", "prune", "trust why", "serve", "inspect", "validate"])
def test_bundle_is_completed(command: str, bundle: Bundle) -> None:
    assert f"org/tiny:v{bundle.version}" in complete(f"coldstart {command} org/")
    assert complete(f"coldstart {command} no-such-thing") == []


def test_the_second_reference_and_another_cache_are_completed(bundle: Bundle, tmp_path: Path) -> None:
    assert complete("coldstart export org/tiny:v1 org") == ["org/tiny:v1"]
    assert complete(f"coldstart export --cache-dir {tmp_path / 'empty'} org") == []
    assert complete("coldstart serve org/tin") == ["org/tiny", "org/tiny:v1"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"null", b"{" * 10_000])
def test_a_damaged_store_completes_models_alone(bundle: Bundle, content: bytes) -> None:
    (Cache.at().bundles / "index.json").write_bytes(content)
    assert complete("coldstart serve tiny-l") == ["tiny-llama"]
    assert complete("coldstart export ") == []
