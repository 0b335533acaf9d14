"""Every flag of vLLM's parser, and every variable that the installed sources read: who may have read it, and what a mode does.

    python benchmarks/flags.py MODEL_DIRECTORY [--json FILE]

A flag is `the server's own` where vLLM's engine arguments have no field for it: a forked or thawed server parses it itself. Any
other flag is tried with another value than its default, and the configurations are compared as a worker's adoption compares
them: `steps down` where the worker would be told something else, `honoured` where what differs is the engine's own or nothing a
worker is told. `refused` are values that vLLM itself does not take here. No engine is started.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import environment_reads

from coldstart.machine import secrets
from coldstart.serve import template_environment

PACKAGES = (
    "vllm",
    "torch",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "numpy",
    "xgrammar",
    "compressed_tensors",
)


def flags(model: str) -> list[dict[str, Any]]:
    """One row for each flag: its name, the verdict, the leaf that differs, the seconds that the decision took."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from coldstart.vllm.engine import adoption, server

    base = ["--model", model, "--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
    built = adoption.facts(server.configure(server.parse_args(base)))
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    rows = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if not action.option_strings or action.dest in (
            "help",
            "model",
            "max_model_len",
            "kv_cache_memory_bytes",
        ):
            continue
        began, leaf = time.monotonic(), None
        if action.dest not in engine:
            verdict = "the server's own"
        else:
            verdict, leaf = _tried(adoption, server, base, action, built)
        rows.append(
            {
                "flag": action.option_strings[0],
                "verdict": verdict,
                "leaf": leaf,
                "seconds": time.monotonic() - began,
            }
        )
    return rows


def _tried(
    adoption: Any, server: Any, base: list[str], action: argparse.Action, built: Any
) -> tuple[str, str | None]:
    refused = None
    for words in _others(action):
        try:
            asked = adoption.facts(server.configure(server.parse_args([*base, *words])))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever vLLM says of a value that it does not take
            refused = f"{type(error).__name__}"
            continue
        reason = adoption.difference(built, asked)
        return ("steps down", reason.partition(":")[0]) if reason else ("honoured", None)
    return f"refused ({refused})", None


def _others(action: argparse.Action) -> list[list[str]]:
    name, default = action.option_strings[0], action.default
    if action.choices:
        return [[name, str(choice)] for choice in action.choices if choice != default]
    if isinstance(default, bool) or isinstance(action, argparse.BooleanOptionalAction):
        negative = next((option for option in action.option_strings if option.startswith("--no-")), name)
        return [[negative if default else name]]
    if isinstance(default, int | float):
        return [[name, str(value)] for value in (default + 1, default / 2, 2, 1)]
    return [[name, value] for value in ("2", "0.5", "auto", "true", "/tmp", '{"a": 1}', "{}")]


def variables() -> dict[str, Any]:
    """How many variables the installed sources read, and how each is judged."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            found |= environment_reads.names(Path(spec.origin).parent)
    return {"read": len(found), **Counter(_judged(name) for name in found)}


def _judged(name: str) -> str:
    if secrets.named(name):
        return "secret: given to no kept process"
    if template_environment.counts(name):
        return "counts: steps down where it differs"
    return (
        "irrelevant, with a reason"
        if name in template_environment.IRRELEVANT
        else "read by nothing that computes"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = flags(asked.model)
    summary = {
        "flags": len(rows),
        **Counter(row["verdict"].partition(" (")[0] for row in rows),
        "slowest": sorted(rows, key=lambda row: -row["seconds"])[:3],
        "variables": variables(),
    }
    if asked.json:
        asked.json.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
