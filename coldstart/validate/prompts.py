"""The prompts of a replay: eight built-in ones, or those of a file.

A file has one prompt on each line. Empty lines are ignored.
"""

from __future__ import annotations

from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe

HINT = "write one prompt per line"
PROMPTS = (
    "The quick brown fox",
    "In the beginning",
    "To start a server quickly, one has to",
    "1 2 3 4 5 6 7",
    "def main():",
    "Once upon a time there was a process",
    "Memory is",
    "A",
)


def read(path: Path) -> tuple[str, ...]:
    """Read the prompts in their order. Raises UsageError for a file that cannot be read or holds no prompt, and for JSON."""
    if path.suffix == ".jsonl":
        raise UsageError(f"cannot read prompts from {path}: JSON lines are not supported", hint=HINT)
    try:
        prompts = tuple(line for line in files.read_text(path).splitlines() if line.strip())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read prompts from {path}: {describe(error)}", hint=HINT) from error
    if not prompts:
        raise UsageError(f"cannot read prompts from {path}: it holds no prompt", hint=HINT)
    return prompts
