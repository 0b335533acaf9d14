"""From the words of `fleet deploy` to what the fleet decides by: figures of the bundle, of the files, or as given.

Where a start's parts are not known apart, all of it counts as the runtime's time: a start takes what the bundle's took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from coldstart.artifacts.errors import BundleError
from coldstart.errors import UsageError
from coldstart.fleet.live.wire import ModelDeployment
from coldstart.fleet.sizing import MOST_RANKS
from coldstart.fleet.specification import FleetModel
from coldstart.fleet.timing import Costs
from coldstart.host.launches import Launch
from coldstart.host.live import lookups, profiles
from coldstart.models.inspection import Lookup
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.units import parse_size
from coldstart.weights.load import stage, tensors


@dataclass(frozen=True, slots=True)
class DeployWords:
    """As typed. Sizes in words, `limits_s` of TTFT and TPOT."""

    least: int
    most: int
    limits_s: tuple[float, float]
    idle_s: float
    batch: int
    memory: str | None = None
    size: str | None = None
    start_s: float | None = None


def limits(text: str | None) -> tuple[float, float]:
    """TTFT and TPOT from `ttft=2,tpot=0.1`, infinite where not given. Raises UsageError."""
    found = {"ttft": inf, "tpot": inf}
    for word in filter(None, (text or "").split(",")):
        name, _, value = word.partition("=")
        try:
            seconds = float(value)
            if name not in found or seconds <= 0:
                raise ValueError
        except ValueError as error:
            raise UsageError(f"--slo {text!r} is no limit", hint="--slo ttft=2,tpot=0.1") from error
        found[name] = seconds
    return found["ttft"], found["tpot"]


def made(launch: Launch, wanted: DeployWords, cache: Cache, *, offline: bool) -> ModelDeployment:
    """Raises what a look-up raises, NoBundleError where one is needed, UsageError where a figure is not known."""
    found = lookups.of_launch(launch, cache, offline=offline)
    if wanted.memory is None and not runtime.targets_cpu():
        raise UsageError("no bundle says how much of a GPU's memory a model takes", hint="--memory 24GB")
    shares: dict[int, tuple[int, ...]] = {}
    if wanted.size:
        weights = parse_size(wanted.size)
    else:
        shares = ranks_bytes(found)
        weights = profiles.weights_bytes(found.model.path) or (shares[1][0] if shares else 0)
    if not weights:
        raise UsageError(f"{launch.name}: no weights lie here to say how large they are", hint="--size 24GB")
    memory, start_s = parse_size(wanted.memory) if wanted.memory else 0, wanted.start_s
    if not memory or start_s is None:
        known = profiles.of_lookup(launch, found)
        memory, start_s = memory or known.memory, known.start_s if start_s is None else start_s
    spec = FleetModel(
        launch.name,
        weights,
        max(memory, weights),
        Costs(library_s=start_s),
        *wanted.limits_s,
        batch=wanted.batch,
        least=wanted.least,
        most=wanted.most,
        idle_s=wanted.idle_s,
        shares=shares,
    )
    return ModelDeployment(launch, spec)


def ranks_bytes(found: Lookup) -> dict[int, tuple[int, ...]]:
    """Bytes of the tensors that each rank needs, by number of ranks, as the bundle has them; {} where none says."""
    try:
        plan: Any = found.weights_donor.json("weights") if found.weights_donor else None
        ordered = tensors.ordered(plan) if isinstance(plan, Mapping) else []
    except (BundleError, tensors.UnreadableWeightsError):
        return {}
    config, size = found.model.config, {tensor.name: tensor.size for tensor in ordered}
    most = min(MOST_RANKS, int(config.get("num_hidden_layers") or 1))

    def rank(number: int, count: int) -> int:
        return sum(size[name] for name in stage.needed(list(size), config, [number], count))

    return {n: tuple(rank(one, n) for one in range(n)) for n in range(1, most + 1)} if size else {}
