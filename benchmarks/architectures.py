"""Which architectures start from a bundle: tiny random models of each, against plain vLLM with the same arguments.

    python benchmarks/architectures.py [--only NAME]... [--modes fresh,template-engine]

One row: plain vLLM serves the model or refuses it, in words that are kept. Then `materialize`, and a server from the bundle
in each mode, whose answers must be plain vLLM's own: greedy tokens for three prompts, or the vectors of an embedding. A row
is whole where that is so in every mode, and where coldstart refuses with vLLM's own words what vLLM refuses. What a bundle
lacks is in the row with the reason that `inspect` shows. Each row is written as it comes, and joins those that are there.
No time is measured here. CPU only; the models are those of tests/support/architectures.py.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from coldstart.artifacts.store import Store  # noqa: E402
from support import architectures  # noqa: E402
from support.plain_vllm import PlainVllm  # noqa: E402
from tools.machine import PROMPTS, READY_S, Machine  # noqa: E402

from coldstart.key import inspection  # noqa: E402
from coldstart.machine import logs  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.validate import openai  # noqa: E402
from coldstart.validate.launch import HOST  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "architectures-cpu.json"
MODELS = ROOT / "build" / "architectures"
MODES = ("fresh", "template-engine")
TOKENS = 24
# Small enough that a compilation and a warm-up are short; compiled as vLLM would by itself.
ARGS = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "128",
        "--kv-cache-memory-bytes", str(32 << 20))  # fmt: skip
_BACKEND = "Transformers modeling backend"


@dataclass(frozen=True)
class Row:
    """One model, and where everything of it lies."""

    name: str
    model: Path
    machine: Machine

    @property
    def eager(self) -> tuple[str, ...]:
        """Where the model is not compiled, the flag that says so."""
        return () if architectures.ARCHITECTURES[self.name].compiled else ("--enforce-eager",)

    @property
    def vllm_args(self) -> tuple[str, ...]:
        """ARGS and the architecture's own."""
        return (*ARGS, *self.eager, *architectures.vllm_args(self.name, self.model))

    def asked(self, port: int) -> list[list[float]]:
        """What the server at `port` answers to PROMPTS: token ids, or vectors."""
        one = architectures.ARCHITECTURES[self.name]
        called = one.name or _models(port)[0]
        if one.asks == "vector":
            answers = [
                _post(port, "/v1/embeddings", {"model": called, "input": prompt}) for prompt in PROMPTS
            ]
            return [answer["data"][0]["embedding"] for answer in answers]
        bodies = [
            openai.build_request(prompt, TOKENS, stream=False, model=called, token_ids=True)
            for prompt in PROMPTS
        ]
        return [_post(port, openai.COMPLETIONS, body)["choices"][0]["token_ids"] for body in bodies]

    def plain(self, vllm: PlainVllm, log: Path) -> list[list[float]] | None:
        """What plain vLLM answers; None where it refuses the model, with its words in `log`."""
        one = architectures.ARCHITECTURES[self.name]
        adapter = f"{self.model}{architectures.ADAPTER}" if one.extra == "adapter" else None
        request = {
            "args": ["--model", str(self.model), *self.vllm_args],
            "prompts": PROMPTS,
            "adapter": adapter,
        }
        return vllm.answers(request | {"tokens": TOKENS if one.asks == "tokens" else None}, log)

    def materialized(self) -> tuple[dict[str, Any] | None, str]:
        """(what `materialize` printed, None; or None and what it said instead)."""
        options = ("--profile-seconds", "1", "--format", "json")
        arguments = ("materialize", str(self.model), *options, "--", *self.vllm_args)
        process = self.machine.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said, errors = process.communicate(timeout=READY_S)
        return (json.loads(said) if process.returncode == 0 else None), errors.decode(errors="replace")

    def served(self, mode: str, expected: list[list[float]]) -> dict[str, Any]:
        """One server from the bundle: the mode it took, what it fell back from, whether it answers as expected."""
        level = mode.removeprefix("template-")
        if level != mode:
            self.machine.run("template", "start", str(self.model), "--level", level, "--", *self.vllm_args)
        try:
            with self.machine.serving(str(self.model), "--mode", mode, vllm=self.vllm_args) as served:
                answers, report = self.asked(served.client.port), served.report
        finally:
            if level != mode:
                self.machine.run("template", "stop", "--level", level)
        found = {"mode": report["mode"], "fast_path": report["fast_path"], "fallbacks": report["fallbacks"]}
        furthest = max(_distance(one, other) for one, other in zip(answers, expected, strict=True))
        return found | {"equal": answers == expected, "furthest": furthest}


def measured(name: str, work: Path, vllm: PlainVllm, modes: Sequence[str]) -> dict[str, Any]:
    """One row of the result."""
    one = architectures.ARCHITECTURES[name]
    row = Row(name, architectures.build(name, MODELS), Machine(work / "m"))
    config = json.loads((row.model / "config.json").read_text())
    expected = row.plain(vllm, work / "plain.log")
    found: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "asks": one.asks,
        "vllm_args": [*row.eager, *one.vllm_args],
        "vllm": "refuses" if expected is None else "serves",
        "backend": "transformers" if _BACKEND in (work / "plain.log").read_text(errors="replace") else "vllm",
    }
    if expected is None:
        found["vllm_words"] = logs.words(work / "plain.log") or "no word"
    else:
        found["distinct"] = len({token for answer in expected for token in answer})
    said, errors = row.materialized()
    found["materialized"] = said is not None
    if said is None or expected is None:
        found["reason"] = (
            errors.strip().splitlines()[-1] if said is None else "vLLM refuses it, coldstart does not"
        )
        if said is None and expected is None and found["vllm_words"] in errors:
            found["reason"] = found["vllm_words"]
        return found | {"whole": said is None and found["reason"] == found.get("vllm_words")}
    bundle = Store(row.machine.cache / "bundles").get(said["ref"])
    found["sections"] = [section.type for section in bundle.manifest.sections]
    # The processor has no graphs at all; that is no property of the model.
    found["left_out"] = {k: v for k, v in inspection.list_missing_sections(bundle).items() if k != "graphs"}
    found["modes"] = {mode: _row(row, mode, expected) for mode in modes}
    wrong = [f"{mode}: {_fault(mode, held)}" for mode, held in found["modes"].items() if _fault(mode, held)]
    return found | {"whole": not wrong} | ({"reason": "; ".join(wrong)} if wrong else {})


def _row(row: Row, mode: str, expected: list[list[float]]) -> dict[str, Any]:
    try:
        return row.served(mode, expected)
    except (AssertionError, OSError, LookupError) as error:
        return {"mode": None, "equal": False, "error": str(error)[-600:]}


def _fault(mode: str, held: dict[str, Any]) -> str:
    if "error" in held:
        return str(held["error"])
    if held["mode"] != mode:
        return f"{held['mode']} instead: {held['fallbacks']}"
    return "" if held["equal"] else "another answer than plain vLLM's"


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def _models(port: int) -> list[str]:
    return [one["id"] for one in _ask(port, "GET", "/v1/models", None)["data"]]


def _post(port: int, path: str, body: dict[str, Any]) -> Any:
    return _ask(port, "POST", path, json.dumps(body))


def _ask(port: int, method: str, path: str, body: str | None) -> Any:
    connection = http.client.HTTPConnection(HOST, port, timeout=READY_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = response.read()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {said[:300].decode(errors='replace')}")
        return json.loads(said)
    finally:
        connection.close()


def keep(name: str, row: dict[str, Any]) -> None:
    """Join one row to the result."""
    held = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    versions = facts.versions() | {"transformers": version("transformers")}
    held |= {"date": facts.today(), "versions": versions, "machine": facts.machine(), "vllm_args": ARGS}
    rows = held["rows"] | {name: row}
    held["rows"] = {name: rows[name] for name in architectures.ARCHITECTURES if name in rows}
    held["whole"] = f"{sum(row['whole'] for row in rows.values())} of {len(rows)}"
    RESULT.write_text(json.dumps(held, indent=1) + "\n")


def main() -> None:
    """Measure the rows that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(architectures.ARCHITECTURES), metavar="NAME")
    parser.add_argument("--modes", default=",".join(MODES))
    asked = parser.parse_args()
    vllm = PlainVllm(MODELS / "vllm-caches")
    for name in asked.only or architectures.ARCHITECTURES:
        # A short path: unix sockets lie below it.
        with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as directory:
            row = measured(name, Path(directory), vllm, asked.modes.split(","))
        keep(name, row)
        print(json.dumps({name: row}), flush=True)
    vllm.close()


if __name__ == "__main__":
    main()
