"""From the words of `fleet deploy` to what the fleet decides by: figures of the bundle, of the files, or as given.

Where a start's parts are not known apart, all of it counts as the runtime's time: a start takes what the bundle's took.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coldstart.cluster.wire import ModelDeployment
from coldstart.errors import Usage
from coldstart.fleet.specification import FleetModel
from coldstart.fleet.timing import Costs
from coldstart.gateway import lookups, profiles
from coldstart.host.configuration import size
from coldstart.host.launches import Launch
from coldstart.machine import runtime
from coldstart.machine.paths import Cache


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
    """TTFT and TPOT from `ttft=2,tpot=0.1`, infinite where not given. Raises Usage."""
    found = {"ttft": inf, "tpot": inf}
    for word in filter(None, (text or "").split(",")):
        name, _, value = word.partition("=")
        try:
            seconds = float(value)
            if name not in found or seconds <= 0:
                raise ValueError
        except ValueError as error:
            raise Usage(f"--slo {text!r} is no limit", mend="--slo ttft=2,tpot=0.1") from error
        found[name] = seconds
    return found["ttft"], found["tpot"]


def made(launch: Launch, wanted: DeployWords, cache: Cache, *, offline: bool) -> ModelDeployment:
    """Raises what a look-up raises, NoBundle where one is needed, Usage where a figure is not known."""
    found = lookups.of_launch(launch, cache, offline=offline)
    if wanted.memory is None and not runtime.targets_cpu():
        raise Usage("no bundle says how much of a GPU's memory a model takes", mend="--memory 24GB")
    weights = size(wanted.size) if wanted.size else profiles.weights_bytes(found.model.path)
    if not weights:
        raise Usage(f"{launch.name}: no weights lie here to say how large they are", mend="--size 24GB")
    memory, start_s = size(wanted.memory) if wanted.memory else 0, wanted.start_s
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
    )
    return ModelDeployment(launch, spec)
