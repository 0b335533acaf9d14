"""Help and version load no engine, whatever the command."""

import json
import subprocess
import sys

import pytest
from coldstart.commands.cli import COMMANDS

HEAVY = ["torch", "vllm", "pandas", "transformers", "numpy", "huggingface_hub"]
PROBE = """
import json, sys
from coldstart.commands.cli import main
try:
    main({argv!r})
except SystemExit as stop:
    loaded = [name for name in {heavy!r} if name in sys.modules]
    print(json.dumps({{"code": stop.code, "loaded": loaded}}), file=sys.stderr)
"""


def probe(*argv: str) -> dict[str, object]:
    script = PROBE.format(argv=list(argv), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    answer: dict[str, object] = json.loads(done.stderr.splitlines()[-1])
    return answer


@pytest.mark.parametrize("argv", [("--help",), ("--version",), *((name, "--help") for name in COMMANDS)])
def test_nothing_heavy_is_imported(argv: tuple[str, ...]) -> None:
    assert probe(*argv) == {"code": 0, "loaded": []}


@pytest.mark.parametrize("argv", [("list",), ("doctor",), ("inspect", "no-such-thing")])
def test_commands_that_only_read_import_nothing_heavy_either(argv: tuple[str, ...]) -> None:
    assert probe(*argv)["loaded"] == []


def test_help_of_the_whole_imports_no_command() -> None:
    code = "import sys\nfrom coldstart.commands.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in sys.modules if m.startswith('coldstart.commands.')], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "['coldstart.commands.config_file', 'coldstart.commands.cli']"
