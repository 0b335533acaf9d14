"""The prompts of a replay: eight built-in ones, or those of a file.

A file whose name ends in `.jsonl` has one JSON object with a `prompt` on each line, as for `vllm bench serve --dataset-name
custom`; other members are ignored. Any other file has one prompt on each line. Empty lines are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe

HINT = 'write one prompt per line, or name the file *.jsonl and write one {"prompt": "..."} per line'
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
        lines = files.read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read prompts from {path}: {describe(error)}", hint=HINT) from error
    take = _object if path.suffix == ".jsonl" else str
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(take(line))
            except ValueError as error:
                raise UsageError(
                    f"cannot read prompt in line {number} of {path}: {error}", hint=HINT
                ) from error
    if not prompts:
        raise UsageError(f"cannot read prompts from {path}: it holds no prompt", hint=HINT)
    return tuple(prompts)


def _object(line: str) -> str:
    document = json.loads(line)
    prompt = document.get("prompt") if isinstance(document, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("expected an object with a non-empty string 'prompt'")
    return prompt
