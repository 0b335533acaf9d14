"""docs/operating.md and docs/containers.md: the code contains the messages, commands parse, and linked files exist."""

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
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("operating", "containers", "ci")}
MESSAGES = re.findall(r"^\| `([^`]+)` \|", DOCS["operating"].partition("## Troubleshooting")[2], re.M)
ANYTHING = "\0"


@cache
def code_texts() -> frozenset[str]:
    """Return every text in the code; values that are filled in at run time are ANYTHING."""
    texts = set()
    for package in ("artifacts", "coldstart", "commands"):
        for path in (ROOT / package).rglob("*.py"):
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
def test_documented_message_is_in_the_code(message: str) -> None:
    # A sentence may be put together from two texts; each of its parts is in one.
    for part in message.split("; "):
        wanted = re.escape(part).replace("…", ".*")
        assert any(re.search(wanted, text, re.DOTALL) for text in code_texts()), part


def test_messages_are_found() -> None:
    assert len(MESSAGES) > 18


def test_unknown_message_is_not_in_the_code() -> None:
    assert not any(re.search("The server was not ready after", text) for text in code_texts())


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
def test_documented_command_parses(line: str) -> None:
    if line in EXAMPLES:  # a command's name in a sentence
        return
    parse(shlex.split(line))


@pytest.mark.parametrize("name", DOCS)
def test_linked_files_exist(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", DOCS[name]) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []
