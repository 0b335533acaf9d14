"""Help, version and commands that only read import no heavy package."""

import json
import subprocess
import sys

from coldstart.commands.cli import COMMANDS

HEAVY = ["torch", "vllm", "pandas", "transformers", "numpy", "huggingface_hub", "ray"]
PROBE = """
import json, sys
from coldstart.commands.cli import main
for argv in {commands!r}:
    try:
        main(argv)
    except SystemExit as stop:
        loaded = [name for name in {heavy!r} if name in sys.modules]
        print(json.dumps([" ".join(argv), stop.code, loaded]), file=sys.stderr)
"""


def probe(*commands: list[str]) -> list[list[object]]:
    """Run the commands in one new process; return each with its exit code and the heavy packages imported until then."""
    script = PROBE.format(commands=commands, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]


def test_help_and_version_import_no_heavy_package() -> None:
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    assert probe(*commands) == [[" ".join(argv), 0, []] for argv in commands]


def test_reading_commands_import_no_heavy_package() -> None:
    commands = [["list"], ["doctor"], ["inspect", "no-such-thing"], ["fleet", "status"]]
    assert [loaded for _, _, loaded in probe(*commands)] == [[]] * 4


def test_top_level_help_imports_no_command() -> None:
    code = "import sys\nfrom coldstart.commands.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith('coldstart.commands.')], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "['coldstart.commands.cli']"
