"""The surroundings of a start that fetches its weights: a model directory without them, their plan, a prefetcher of its own."""

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
    """A copy of a model directory without its weights."""
    made = checkpoint.home() / f"{directory.name}-bare"
    shutil.rmtree(made, ignore_errors=True)
    return Path(shutil.copytree(directory, made, ignore=shutil.ignore_patterns("*.safetensors*")))


def plan(directory: Path) -> Path:
    """The file with the weights plan, made on first use."""
    kept = checkpoint.home() / f"{directory.name}.plan.json"
    if not kept.exists():
        kept.write_text(json.dumps(weights.plan(directory)))
    return kept


def runtime() -> Path:
    """A runtime directory for a prefetcher of our own."""
    place = checkpoint.home() / "run"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def sockets() -> Path:
    """Where the prefetcher of `runtime` has its socket."""
    place = runtime() / "coldstart"
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def environment() -> dict[str, str]:
    """For a process that is to be quiet and to use the prefetcher of `runtime`."""
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "XDG_RUNTIME_DIR": str(runtime())}


def streaming(source: str, plan: Path) -> dict[str, str]:
    """For a process that loads its weights from `source` by the plan in that file."""
    return LaunchPlan(Arguments(), weights_from=WeightsRequest(source, plan)).variables()


def stop_prefetcher(place: Path) -> None:
    """End the prefetcher of a runtime directory, where one runs."""
    with suppress(client.PrefetchLostError):
        client.request("stop", directory=place / "coldstart")
