"""What a start will take, from what its bundle's proof start took, beside what it took.

The proof start's stages are the history that equation 5 asks for. Here loading follows the imports: the copy needs the engine's
own parameters. The network's rate is the one last measured for the source, so the first fetch from it is predicted without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.launch import modes
from coldstart.launch.ttft import StartCosts, Worker, ttft
from coldstart.system.paths import Cache

if TYPE_CHECKING:
    from coldstart.launch.ladder import StartedServer
    from coldstart.launch.request import ServeRequest

_LIBRARIES = ("import torch", "import vllm", "import engine")
_LOAD, _FIRST_TOKEN = "load", "first token"
# Spans of the server's main thread that hold all others of the engine; what is left of a start is process creation.
_CONTEXT = ("configure", "start engine", "build app")


@dataclass(frozen=True)
class Prediction:
    """The terms that a start was predicted by, and their sum in seconds."""

    costs: StartCosts
    load_s: float
    fetch_s: float | None
    ttft_s: float

    def document(self) -> dict[str, Any]:
        """The ready file's `predicted`."""
        terms = {**self.costs.document(), "load_s": self.load_s, "fetch_s": self.fetch_s}
        return {"ttft_s": self.ttft_s, "terms": terms}


def predict(bundle: Bundle, mode: str, source: str | None, cache: Cache) -> Prediction | None:
    """The prediction for a start by `mode`; None for a bundle whose proof start said too little, or a mode without loading."""
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
    """The costs in a start's spans (seconds by name) and the seconds of its load; they add up to `ready_s`.

    Raises KeyError for spans that are missing.
    """
    load, prefill = spans[_LOAD], spans.get(_FIRST_TOKEN, 0.0)
    libraries = sum(spans.get(name, 0.0) for name in _LIBRARIES)
    context = max(0.0, sum(spans[name] for name in _CONTEXT) - load)
    creation = max(0.0, ready_s - context - load - libraries - prefill)
    return StartCosts(creation=creation, context=context, libraries=libraries, prefill=prefill), load


def document(
    request: ServeRequest, started: StartedServer, spans: Mapping[str, float]
) -> dict[str, Any] | None:
    """The ready file's `predicted`: what was predicted for this start, with `actual` beside it. Learns the source's rate."""
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
    """The same terms of the start that happened; without a recorded timeline only those that the server itself reported."""
    known: dict[str, Any] = {"ttft_s": ready_s, "terms": {}}
    try:
        costs, load = terms(spans, ready_s)
        known["terms"] = costs.document() | {"load_s": load}
    except KeyError:
        if loads and "seconds" in loads[0]:
            known["terms"]["load_s"] = max(float(load["seconds"]) for load in loads)
    # An earlier start's fetching is not this one's, though the prefetcher still gives an account of it.
    if (moved := _fetch(loads, began)) is not None:
        known["terms"]["fetch_s"] = moved[1]
    return known


def learn_rate(source: str, loads: Sequence[Mapping[str, Any]], cache: Cache) -> None:
    """Remember how fast `source` was, if anything was fetched from it and the cache can be written."""
    moved = _fetch(loads, 0.0)
    if moved is None:
        return
    rates = _rates(cache) | {_origin(source): moved[0] / moved[1]}
    with suppress(OSError):  # the server is up: a full disk must not end it
        _file(cache).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(_file(cache), json.dumps(rates, sort_keys=True).encode())


def known_rate(source: str, cache: Cache) -> float | None:
    """Bytes per second last seen from `source`, None when nothing was ever fetched from it."""
    rate = _rates(cache).get(_origin(source))
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def _fetch(loads: Sequence[Mapping[str, Any]], since: float) -> tuple[int, float] | None:
    for fetch in (load.get("fetch") or {} for load in loads):
        moved, began, ended = fetch.get("fetched_bytes"), fetch.get("began"), fetch.get("ended")
        if moved and began is not None and ended is not None and ended > began >= since:
            return int(moved), float(ended) - float(began)
    return None


def _origin(source: str) -> str:
    # Not urlsplit, which raises for an address that the prefetcher has merely refused.
    scheme, mark, rest = source.partition("://")
    return f"{scheme}://{rest.partition('/')[0].rpartition('@')[2]}" if mark else source


def _file(cache: Cache) -> Path:
    return cache.weights / "rates.json"


def _rates(cache: Cache) -> dict[str, Any]:
    try:
        rates = json.loads(_file(cache).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return rates if isinstance(rates, dict) else {}
