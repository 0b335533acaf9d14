"""The how-to pages: each quoted message is in the code, and each command parses."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from coldstart.commands._examples import EXAMPLES
from tools.command_line import parse
from tools.shell import Run

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs/how-to"
DOCS = {name: (HOW_TO / f"{name}.md").read_text() for name in ("production", "containers", "ci", "host", "fleet", "gpu")}
MESSAGES = re.findall(r"^\| `([^`]+)` \|", DOCS["production"].partition("## Troubleshooting")[2], re.M)
GROUPS = ("host", "fleet")
ANYTHING = "\0"


@cache
def said() -> frozenset[str]:
    """Every text in the code, what is filled in at run time as ANYTHING."""
    texts = set()
    for room in ("artifacts", "coldstart", "commands"):
        for path in (ROOT / room).rglob("*.py"):
            texts.update(_texts(ast.parse(path.read_bytes())))
    return frozenset(texts)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [str(one.value) if isinstance(one, ast.Constant) else ANYTHING for one in node.values]
            yield "".join(parts)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_code_says(message: str) -> None:
    # A sentence may be put together from two texts; each of its parts is in one.
    for part in message.split("; "):
        wanted = re.escape(part).replace("…", ".*")
        assert any(re.search(wanted, text, re.DOTALL) for text in said()), part


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 18


def test_the_rule_would_notice() -> None:
    assert not any(re.search("The server was not ready after", text) for text in said())


@pytest.mark.slow
def test_messages_of_a_real_run(run: Run, home: Path) -> None:
    wrong = run("serve", "org/none", "--offline", code=4).stderr
    assert "it is not in the local hub cache" in wrong
    missed = run("serve", "tiny-llama", code=3).stderr
    assert re.search(r"No bundle for .* with key .* in the store; ", missed)


def commands() -> list[str]:
    lines = [
        line
        for text in DOCS.values()
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    spans = [
        one
        for text in DOCS.values()
        for one in re.findall(r"`(coldstart [a-z][^`]*)`", " ".join(text.split()))
    ]
    named = [line.partition("coldstart-cpu ")[2] for line in lines if "podman run" in line]
    ours = [
        f"coldstart {line.partition('/bin/coldstart ')[2]}" for line in lines if "/bin/coldstart " in line
    ]
    return [
        *(
            line.removeprefix("coldstart ")
            for line in [*lines, *spans, *ours]
            if line.startswith("coldstart ")
        ),
        *filter(None, named),
    ]


@pytest.mark.parametrize("line", commands())
def test_a_command_can_be_typed(line: str) -> None:
    if line in EXAMPLES or line in GROUPS:  # a sentence names the command alone
        return
    parse(shlex.split(line))
