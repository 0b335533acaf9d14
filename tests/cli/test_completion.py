"""Shell completion of models and of bundles: the right words, no error, and no heavy import."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.commands.cli import COMMANDS, find_module_name

from coldstart.models.aliases import NAMES
from coldstart.system.paths import Cache

HEAVY = ["torch", "vllm", "pandas", "transformers", "numpy", "huggingface_hub", "ray", "rich", "starlette"]
PROBE = """
import os, sys
from coldstart.commands.cli import main
for line in sys.argv[1:]:
    os.environ |= {{"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}}
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
    print("END", flush=True)
print(",".join(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""


def complete(*lines: str, absent: Sequence[str] = ()) -> list[list[str]]:
    """Return what a shell would offer for the last word of each line, in one process, which imports nothing `absent`."""
    command = [sys.executable, "-c", PROBE.format(heavy=[*HEAVY, *absent]), *lines]
    variables = {"_COLDSTART_COMPLETE": "complete_bash"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert done.stderr == "\n"
    *offered, _ = done.stdout.split("END\n")
    assert len(offered) == len(lines)
    return [one.split() for one in offered]


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


IMPORTS = """
import json, sys
from coldstart.commands.cli import main
for argv in {commands!r}:
    try:
        main(argv)
    except SystemExit as stop:
        loaded = [name for name in {heavy!r} if name in sys.modules]
        print(json.dumps([" ".join(argv), stop.code, loaded]), file=sys.stderr)
"""


def probe(*commands: list[str], heavy: Sequence[str] = HEAVY[:-2]) -> list[list[object]]:
    """Run the commands in one new process; return each with its exit code and the heavy modules imported until then."""
    script = IMPORTS.format(commands=commands, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]


def test_help_and_version_import_no_heavy_package() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    assert probe(*commands) == [[" ".join(argv), 0, []] for argv in commands]


def test_reading_commands_import_no_heavy_package() -> None:
    commands = [["list"], ["doctor"], ["inspect", "no-such-thing"], ["fleet", "status"]]
    assert [loaded for _, _, loaded in probe(*commands)] == [[]] * 4


def test_top_level_help_imports_no_command() -> None:
    assert probe(["--help"], heavy=[find_module_name(name) for name in COMMANDS]) == [["--help", 0, []]]
