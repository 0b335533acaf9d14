"""Environment of a start that fetches weights: a model directory without weights, their plan, and a prefetcher."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from benchmarks.weights import checkpoint
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.weights import weights_plan as weights
from coldstart.weights.prefetch import client


def bare(directory: Path) -> Path:
    """Copy a model directory without its weights."""
    made = checkpoint.home() / f"{directory.name}-bare"
    shutil.rmtree(made, ignore_errors=True)
    return Path(shutil.copytree(directory, made, ignore=shutil.ignore_patterns("*.safetensors*")))


def plan(directory: Path) -> Path:
    """Return the file with the weights plan, written on first use."""
    kept = checkpoint.home() / f"{directory.name}.plan.json"
    if not kept.exists():
        kept.write_text(json.dumps(weights.plan(directory)))
    return kept


def runtime() -> Path:
    """Return the runtime directory of the benchmarks' prefetcher."""
    place = checkpoint.home() / "run"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def sockets() -> Path:
    """Return the directory of the socket of the prefetcher in `runtime`."""
    place = runtime() / "coldstart"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def environment() -> dict[str, str]:
    """Return the environment of a quiet process that uses the prefetcher in `runtime`."""
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "XDG_RUNTIME_DIR": str(runtime())}


def streaming(source: str, plan: Path) -> dict[str, str]:
    """Return the variables of a process that loads weights from `source` by the plan."""
    return LaunchPlan(Arguments(), weights_from=WeightsRequest(source, plan)).variables()


def stop_prefetcher(place: Path) -> None:
    """End the prefetcher of a runtime directory, where one runs."""
    with suppress(client.PrefetchLostError):
        client.request("stop", directory=place / "coldstart")
