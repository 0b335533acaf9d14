"""Every feature on two versions of vLLM, run for real.

    python benchmarks/vllm_versions.py run 0.31.0      an environment of its own below build/, every feature on it
    python benchmarks/vllm_versions.py run             the same with the pinned version, in this environment

A run is: materialize, fresh, both templates, the scheduler over a KV pool that holds a quarter of the requests, and weights
fetched while the server starts. Each server must answer what the same version's ordinary server answers (vLLM's entry point),
asked one by one; for the scheduler after a crowd whose requests are evicted. Then every fallback for real: `check` reports that
a vLLM integration point is missing, and the server must come up another way, with the reason. No time is measured. CPU only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_environment import Environment, environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = "tiny-llama"
ARGS = ("--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "32")
PLENTY = (*ARGS, "--kv-cache-memory-bytes", str(256 << 20))
# 14 blocks of 32 tokens of 8 layers' keys and values: fewer than four requests end with.
SCARCE = (*ARGS, "--kv-cache-memory-bytes", str(14 * 2 * 8 * 2 * 64 * 4 * 32))
MLFQ = ("--scheduler", "skip-join-mlfq", "--batch", "4", "--kv-host-memory", str(1 << 27))
REQUESTS, TOKENS = 12, 110
SINGLE, SINGLE_TOKENS = 4, 40


def run(version: str | None) -> dict[str, Any]:
    """Every feature on one version; each row says whether it was taken, and why not."""
    python = environment(version) if version else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as directory:
        here = Environment(python, Path(directory))
        said = here.run("materialize", MODEL, "--format", "json", "--", *PLENTY)
        (model,) = (here.work / "cache" / "models").glob(f"*/{MODEL}")
        bare = here.work / "bare" / MODEL
        shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        with here.ordinary(model, PLENTY):
            expected = _one_by_one(here)
        found = {
            "versions": _versions(python),
            "tokens_compared": sum(map(len, expected)),
            "incompatible": _incompatible(python),
            "features": {"materialize": json.loads(said)["ref"]} | _features(here, model, bare, expected),
        }
        _keep(found)  # the rest takes minutes, too
        found["step_downs"] = _step_downs(here, model, expected)
        here.run("prefetch", "stop")  # it would keep the weights for the next server
        return found


def _features(here: Environment, model: Path, bare: Path, expected: list[list[str]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    rows["cold start: fresh"] = _row(here, expected, MODEL, "--mode", "fresh", "--", *PLENTY)
    for level in ("runtime", "engine"):
        here.run("template", "start", MODEL, "--level", level, "--", *PLENTY)
        rows[f"template: {level}"] = _row(here, expected, MODEL, "--mode", f"template-{level}", "--", *PLENTY)
        here.run("template", "stop", "--level", level)
    here.run("materialize", MODEL, "--", *SCARCE)
    rows["scheduler"] = _row(here, expected, MODEL, "--mode", "fresh", *MLFQ, "--", *SCARCE, ask=_crowd)
    weights = ("--mode", "fresh", "--weights-from", str(model), "--", *PLENTY)
    rows["weights"] = _row(here, expected, str(bare), *weights)
    return rows


def _step_downs(here: Environment, model: Path, expected: list[list[str]]) -> dict[str, Any]:
    """The same servers where `check` reports a missing integration point, one feature at a time."""
    plain = (MODEL, "--mode", "fresh", "--", *PLENTY)
    fetching = (str(model), "--mode", "fresh", "--weights-from", str(model), "--", *PLENTY)
    swapping = (MODEL, "--mode", "fresh", *MLFQ, "--", *SCARCE)
    commands = dict.fromkeys(("start", "worker", "compile", "lazy-kv"), plain) | {
        "weights": fetching, "scheduler": swapping, "offload": swapping,
    }  # fmt: skip
    rows: dict[str, Any] = {}
    for feature, command in commands.items():
        with here.without(feature):
            rows[feature] = _row(here, expected, *command)
    with here.without("template"):
        here.run("template", "start", MODEL, "--level", "engine", "--", *PLENTY)
        rows["template"] = _row(here, expected, MODEL, "--mode", "template-engine", "--", *PLENTY)
        here.run("template", "stop", "--level", "engine")
    return rows


def _one_by_one(here: Environment) -> list[list[str]]:
    return [here.complete(number, SINGLE_TOKENS) for number in range(SINGLE)]


def _crowd(here: Environment) -> list[list[str]]:
    """All at once, for the counters' sake: what a batch answers depends on who is in it. Then as always."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        answered = list(pool.map(lambda number: here.complete(number, TOKENS), range(REQUESTS)))
    assert all(len(tokens) == TOKENS for tokens in answered)
    return _one_by_one(here)


Ask = Callable[[Environment], list[list[str]]]


def _row(
    here: Environment, expected: list[list[str]], *command: str, ask: Ask = _one_by_one
) -> dict[str, Any]:
    with here.serving(*command) as report:
        answered = ask(here)
        loads = [load.get("way") for load in report.get("loads", [])]
        return {
            "mode": report.get("mode"), "fast_path": report.get("fast_path"), "fallbacks": report.get("fallbacks"),
            "canary": report.get("canary"), "answers": len(expected),
            "answers_as_vllm": sum(map(list.__eq__, answered, expected)), "weights_way": loads,
            "counters": {n: v for n, v in here.counters().items() if v and n in ("parks", "evictions", "loads", "demotions")},
        }  # fmt: skip


def _incompatible(python: Path) -> dict[str, str]:
    """Return what the full check finds, by feature."""
    code = (
        "import json; from coldstart.vllm.compat.report import check_compatibility; "
        "print(json.dumps(check_compatibility()))"
    )
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import version; from coldstart.vllm import compat; "
        "print(json.dumps({'vllm': compat.version(), **{n: version(n) for n in ('torch', 'transformers', 'xgrammar')}}))"
    )
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True)
    told: dict[str, str] = json.loads(done.stdout)
    return told


def _keep(found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1, sort_keys=True)
    (RESULTS / f"vllm-{found['versions']['vllm']}-run.json").write_text(f"{text}\n")


def main(arguments: list[str]) -> int:
    """Write the result below results/ and print it."""
    found = run(next(iter(arguments[1:]), None))
    _keep(found)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
