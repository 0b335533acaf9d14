"""The prompts of a replay: eight built-in ones, or those of a file.

A name that ends in `.jsonl` is JSON Lines, one object with a `prompt` on each, the form of `vllm bench serve --dataset-name
custom`; its other members are ignored. Any other file has one prompt on each line. Empty lines are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

from coldstart.errors import UsageError

MEND = 'one prompt a line, or in a file named *.jsonl one {"prompt": "..."} a line'
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
    """Read the prompts in their order. Raises UsageError for a file that cannot be read or holds no prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}", hint=MEND) from error
    take = _object if path.suffix == ".jsonl" else str
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(take(line))
            except ValueError as error:
                raise UsageError(
                    f"cannot read prompt in line {number} of {path}: {error}", hint=MEND
                ) from error
    if not prompts:
        raise UsageError(f"cannot read prompts from {path}: it holds no prompt", hint=MEND)
    return tuple(prompts)


def _object(line: str) -> str:
    document = json.loads(line)
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("expected an object with a non-empty string 'prompt'")
    return prompt
