"""What is known of a model before it was ever started here: its bundle's own figures, else an assumption that says so.

A bundle's `stages` hold the time to ready and the memory (proportional set size) of the start that proved it. On a GPU the
latter says nothing of the device's memory, so there the host's file has to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.errors import UsageError
from coldstart.host.configuration import Profile, Profiles
from coldstart.host.launches import FORKED, Launch
from coldstart.host.live import lookups
from coldstart.launch.modes.template_engine import TEMPLATE_ENGINE
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import weight_files
from coldstart.system import runtime
from coldstart.system.paths import Cache

# vLLM's own on the processor where nothing is said, the libraries of its two processes, and an ordinary start.
ASSUMED_KV = 4 << 30
ASSUMED_RUNTIME = 1 << 30
ASSUMED_START_S = 60.0
# A runtime template by itself: the pages of torch and vLLM that are its own. A server forked from it shares them with it.
RUNTIME_TEMPLATE_BYTES = 540 << 20
# What a server forked from its engine template has still to do.
_STILL_TO_DO = ("start engine", "build app", "first token")
_DONE_WITHIN = ("build worker",)


def of_bundles(cache: Cache, *, offline: bool) -> Profiles:
    """Profiles by look-up.

    They raise what a look-up raises, NoBundleError where one is needed, UsageError where nothing is known.
    """

    def profile(launch: Launch) -> Profile:
        if launch.engine_template and (why := TEMPLATE_ENGINE.unavailable()):
            raise UsageError(f"models.{launch.name}: engine_template: {why.reason}", hint="leave it away")
        if not runtime.targets_cpu():
            raise UsageError(
                f"models.{launch.name}: no bundle says how much of a GPU's memory a model takes",
                hint="write memory and start_s for it in the host file",
            )
        known = of_lookup(launch, lookups.of_launch(launch, cache, offline=offline))
        if launch.mode not in FORKED:
            return known
        return replace(known, shared=min(RUNTIME_TEMPLATE_BYTES, known.memory * 3 // 4))

    return profile


def of_lookup(launch: Launch, found: Lookup) -> Profile:
    """What its bundle says, else an assumption. Raises UsageError where no weights lie here either."""
    known = None if found.bundle is None else of_bundle(found.bundle)
    return known or assumed(launch, found.model.path)


def of_bundle(bundle: Bundle) -> Profile | None:
    """Memory and seconds of its proof start; None for a bundle that does not say."""
    try:
        stages: Any = bundle.json("stages")
        memory, start_s = int(stages["memory_bytes"]), float(stages["ready_s"])
    except (BundleError, KeyError, TypeError, ValueError):
        return None
    if memory <= 0 or start_s < 0:
        return None
    return Profile(memory, start_s, "bundle", _forked(stages.get("spans")))


def _forked(spans: Any) -> float | None:
    """Seconds of a start from an engine template, by the proof start's own stages."""
    try:
        seconds = sum(float(spans[name]) for name in _STILL_TO_DO)
        seconds -= sum(float(spans[name]) for name in _DONE_WITHIN)
    except (KeyError, TypeError, ValueError):
        return None
    return max(0.0, seconds)


def weights_bytes(model: Path | None) -> int:
    """Bytes of the weights that lie in a model's directory; 0 where none do."""
    return 0 if model is None else sum(file.stat().st_size for file in weight_files(model))


def assumed(launch: Launch, model: Path | None) -> Profile:
    """From the size of the weights and the KV cache asked for. Raises UsageError where no weights lie here."""
    weights = weights_bytes(model)
    if not weights:
        raise UsageError(
            f"models.{launch.name}: neither a bundle nor weights say how much memory it takes",
            hint="write memory and start_s for it in the host file",
        )
    kv = launch.args.number("kv_cache_memory_bytes", ASSUMED_KV)
    return Profile(weights + kv + ASSUMED_RUNTIME, ASSUMED_START_S, "assumed")
