"""Shell completion of models and of bundles: the right words, no error, and no heavy import."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.commands.cli import COMMANDS, find_module_name

from coldstart.models.aliases import NAMES
from coldstart.system.paths import Cache

HEAVY = ["torch", "vllm", "pandas", "transformers", "numpy", "huggingface_hub", "ray", "rich", "starlette"]
PROBE = """
import json, os, sys
from coldstart.commands.cli import main
heavy, *commands = map(json.loads, sys.argv[1:])
for argv in commands:
    if isinstance(argv, str):
        os.environ |= {"COMP_WORDS": argv, "COMP_CWORD": str(argv.count(" "))}
    try:
        main(argv)
    except SystemExit as stop:
        print("END", json.dumps([stop.code, [name for name in heavy if name in sys.modules]]), flush=True)
"""


def run(commands: Iterable[object], heavy: Sequence[str]) -> list[tuple[str, object, object]]:
    """Run commands, or complete lines, in one new process. Return output, exit code and imported heavy modules of each."""
    command = [sys.executable, "-c", PROBE, *map(json.dumps, (heavy, *commands))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *parts, _ = re.split(r"^END (.*)\n", done.stdout, flags=re.MULTILINE)
    return [(output, *json.loads(end)) for output, end in zip(parts[::2], parts[1::2], strict=True)]


def complete(*lines: str, absent: Sequence[str] = ()) -> list[list[str]]:
    """Return what a shell would offer for the last word of each line, in one process, which imports nothing `absent`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_COLDSTART_COMPLETE", "complete_bash")
        found = run(lines, [*HEAVY, *absent])
    assert [one[1:] for one in found] == [(0, [])] * len(lines)
    return [output.split() for output, *_ in found]


def test_model_is_completed(home: Path) -> None:
    commands = ["serve", "up", "materialize", "inspect", "validate", "template start", "down"]
    assert complete(*(f"coldstart {one} tiny-l" for one in commands)) == [["tiny-llama"]] * len(commands)


def test_commands_are_completed_without_importing_one() -> None:
    modules = [find_module_name(name) for name in COMMANDS]
    assert complete("coldstart ", "coldstart tr", absent=modules) == [
        list(COMMANDS),
        ["trace-replay", "trust"],
    ]
    assert complete("coldstart serve --mod", absent=["coldstart.launch.server_process"]) == [["--mode"]]


def test_bundle_is_completed(bundle: Bundle) -> None:
    commands = ["export", "push", "prune", "trust why", "serve", "inspect", "validate"]
    for offered in complete(*(f"coldstart {one} org/" for one in commands)):
        assert f"org/tiny:v{bundle.version}" in offered
    nothing = complete(*(f"coldstart {one} no-such-thing" for one in commands))
    assert nothing == [[]] * len(commands)


def test_a_damaged_store_completes_models_alone(bundle: Bundle, tmp_path: Path) -> None:
    lines = []
    for number, content in enumerate((b"{", b"[]", b"\xff\xfe", b"null", b"{" * 10_000)):
        cache = tmp_path / str(number)
        shutil.copytree(Cache.at().bundles, cache / "bundles")
        (cache / "bundles" / "index.json").write_bytes(content)
        lines += [f"coldstart {one} --cache-dir {cache} " for one in ("serve", "export")]
    assert complete(*lines) == [list(NAMES), []] * 5


def probe(*commands: list[str], heavy: Sequence[str] = HEAVY[:-2]) -> list[list[object]]:
    """Run the commands in one new process; return each with its exit code and the heavy modules imported until then."""
    return [
        [" ".join(argv), *found] for argv, (_, *found) in zip(commands, run(commands, heavy), strict=True)
    ]


def test_help_and_version_import_no_heavy_package() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    # An installation without extras has none of these.
    extras = ["aiohttp", "cronsim", "obstore", "starlette"]
    assert probe(*commands, heavy=HEAVY[:-2] + extras) == [[" ".join(argv), 0, []] for argv in commands]


def test_reading_commands_import_no_heavy_package() -> None:
    commands = [["list"], ["doctor"], ["inspect", "no-such-thing"], ["fleet", "status"]]
    assert [loaded for _, _, loaded in probe(*commands)] == [[]] * 4


def test_top_level_help_imports_no_command() -> None:
    assert probe(["--help"], heavy=[find_module_name(name) for name in COMMANDS]) == [["--help", 0, []]]
