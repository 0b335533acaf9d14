"""What is known of a model before it was ever started here: its bundle's own figures, else an assumption that says so.

A bundle's `stages` hold the time to ready and the memory (proportional set size) of the start that proved it. On a GPU the
latter says nothing of the device's memory, so there the host's file has to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import BundleError
from coldstart.errors import Usage
from coldstart.host.configuration import Profile, Profiles
from coldstart.host.launches import FAIL, FORKED, Launch
from coldstart.key import inspection
from coldstart.machine import modes, runtime
from coldstart.machine.paths import Cache
from coldstart.model.models import weight_files

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
    """Profiles by look-up. They raise what a look-up raises, NoBundle where one is needed, Usage where nothing is known."""

    def profile(launch: Launch) -> Profile:
        if launch.engine_template and (refusal := modes.refusal("template-engine")):
            raise Usage(f"models.{launch.name}: engine_template: {refusal.reason}", mend="leave it away")
        found = inspection.look_up(
            launch.model,
            launch.args,
            cache=cache,
            offline=offline,
            revision=launch.revision,
            accepts=anyone if launch.untrusted else None,
        )
        if not runtime.targets_cpu():
            raise Usage(
                f"models.{launch.name}: no bundle says how much of a GPU's memory a model takes",
                mend="write memory and start_s for it in the host file",
            )
        if found.bundle is None and launch.on_miss == FAIL:
            raise inspection.miss(found)
        known = None if found.bundle is None else of_bundle(found.bundle)
        known = known or assumed(launch, found.model.path)
        if launch.mode not in FORKED:
            return known
        return replace(known, shared=min(RUNTIME_TEMPLATE_BYTES, known.memory * 3 // 4))

    return profile


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


def assumed(launch: Launch, model: Path | None) -> Profile:
    """From the size of the weights and the KV cache asked for. Raises Usage where no weights lie here."""
    weights = 0 if model is None else sum(file.stat().st_size for file in weight_files(model))
    if not weights:
        raise Usage(
            f"models.{launch.name}: neither a bundle nor weights say how much memory it takes",
            mend="write memory and start_s for it in the host file",
        )
    kv = launch.args.number("kv_cache_memory_bytes", ASSUMED_KV)
    return Profile(weights + kv + ASSUMED_RUNTIME, ASSUMED_START_S, "assumed")
