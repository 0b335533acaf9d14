"""Predict the time of a start from the proof start of its bundle, and compare it with the measured time.

The proof start's stages are the history that equation 5 of ParaServe needs. Here loading follows the imports, because the copy
needs the engine's parameters. The network rate is the one last measured for the source, so the first fetch from a source is
predicted without a network term.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts import canonical, files
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.launch import modes
from coldstart.launch.ttft import StartCosts, Worker, ttft
from coldstart.system.paths import Cache

if TYPE_CHECKING:
    from coldstart.launch.ladder import StartedServer
    from coldstart.launch.request import ServeRequest

_LIBRARIES = ("import torch", "import vllm", "import engine")
_LOAD, _FIRST_TOKEN = "read tensors", "first token"
# Name of _LOAD in the bundles of earlier releases.
_EARLIER_LOAD = "load"
# Spans of the server's main thread that contain all others of the engine; the remaining time is process creation.
_CONTEXT = ("configure", "start engine", "build app")


@dataclass(frozen=True)
class Prediction:
    """Terms of a predicted start, and their sum in seconds."""

    costs: StartCosts
    load_s: float
    fetch_s: float | None
    ttft_s: float

    def document(self) -> dict[str, Any]:
        """Return the ready file's `predicted`."""
        terms = {**self.costs.document(), "load_s": self.load_s, "fetch_s": self.fetch_s}
        return {"ttft_s": self.ttft_s, "terms": terms}


def predict(bundle: Bundle, mode: str, source: str | None, cache: Cache) -> Prediction | None:
    """Predict a start with `mode`. Return None if the mode loads no weights or the bundle's proof start lacks stages."""
    try:
        stages: Any = bundle.json("stages")
        plan: Any = bundle.json("weights")
        costs, load_s = terms(stages["spans"], float(stages["ready_s"]))
        size = sum(tensor["size"] for file in plan["files"] for tensor in file["tensors"])
    except (BundleError, KeyError, TypeError, ValueError):
        return None
    left = modes.find(mode).remaining(costs)
    if left is None or load_s <= 0 or size <= 0:
        return None
    rate = known_rate(source, cache) if source else None
    seconds = ttft(left, size, [Worker(size / load_s, rate)], loads_while_importing=False)
    return Prediction(left, load_s, size / rate if rate else None, seconds)


def terms(spans: Mapping[str, float], ready_s: float) -> tuple[StartCosts, float]:
    """Split a start's `spans` (seconds by name) into its costs and its load time in seconds, which add up to `ready_s`.

    Raises:
        KeyError: A required span is missing.
    """
    load, prefill = spans[_EARLIER_LOAD if _EARLIER_LOAD in spans else _LOAD], spans.get(_FIRST_TOKEN, 0.0)
    libraries = sum(spans.get(name, 0.0) for name in _LIBRARIES)
    context = max(0.0, sum(spans[name] for name in _CONTEXT) - load)
    creation = max(0.0, ready_s - context - load - libraries - prefill)
    return StartCosts(creation=creation, context=context, libraries=libraries, prefill=prefill), load


def document(
    request: ServeRequest, started: StartedServer, spans: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the ready file's `predicted`, with `actual` in it, and store the rate measured for the source."""
    report = started.document()
    source, loads = request.weights_from, report["loads"]
    bundle, cache = request.lookup.bundle, request.lookup.cache
    prediction = predict(bundle, started.mode, source, cache) if bundle else None
    if source is not None:
        learn_rate(source, loads, cache)
    if prediction is None:
        return None
    return prediction.document() | {"actual": actual(spans, report["ready_s"], loads, started.began)}


def actual(
    spans: Mapping[str, float], ready_s: float, loads: Sequence[Mapping[str, Any]], began: float
) -> dict[str, Any]:
    """Return the same terms as measured; without a recorded timeline only those that the server reports."""
    known: dict[str, Any] = {"ttft_s": ready_s, "terms": {}}
    try:
        costs, load = terms(spans, ready_s)
        known["terms"] = costs.document() | {"load_s": load}
    except KeyError:
        if loads and "seconds" in loads[0]:
            known["terms"]["load_s"] = max(float(load["seconds"]) for load in loads)
    # A prefetcher still reports fetches of earlier starts, which do not belong to this start.
    if (moved := _fetch(loads, began)) is not None:
        known["terms"]["fetch_s"] = moved[1]
    return known


def learn_rate(source: str, loads: Sequence[Mapping[str, Any]], cache: Cache) -> None:
    """Store the rate at which `source` delivered, if a fetch used it and the cache is writable."""
    moved = _fetch(loads, 0.0)
    if moved is None:
        return
    rates = _rates(cache) | {_origin(source): moved[0] / moved[1]}
    with suppress(OSError):  # the server is ready, and a full disk must not end it
        _file(cache).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(_file(cache), json.dumps(rates, sort_keys=True).encode())


def known_rate(source: str, cache: Cache) -> float | None:
    """Return the bytes per second last measured for `source`, None before its first fetch."""
    rate = _rates(cache).get(_origin(source))
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _fetch(loads: Sequence[Mapping[str, Any]], since: float) -> tuple[int, float] | None:
    for fetch in (load.get("fetch") or {} for load in loads):
        moved, began, ended = fetch.get("fetched_bytes"), fetch.get("began"), fetch.get("ended")
        if moved and began is not None and ended is not None and ended > began >= since:
            return int(moved), float(ended) - float(began)
    return None


def _origin(source: str) -> str:
    # urlsplit would raise for some addresses that the prefetcher only rejects.
    scheme, mark, rest = source.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}" if mark else source


def _file(cache: Cache) -> Path:
    return cache.weights / "rates.json"


def _rates(cache: Cache) -> dict[str, Any]:
    try:
        rates = canonical.read(_file(cache))
    except (OSError, ValueError):
        return {}
    return rates if isinstance(rates, dict) else {}
