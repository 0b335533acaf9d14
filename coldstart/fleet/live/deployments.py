"""Convert the arguments of `fleet deploy` to a deployment, with values from the bundle, the weights or the command line.

The duration of a start is counted as the runtime's time if its parts are not known. Prefill and decode times are those of the
bundle's measured iterations. The time of a hop between ranks is not measured before a pipeline runs: it counts as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from coldstart.artifacts.errors import BundleError
from coldstart.errors import UsageError
from coldstart.fleet.live.state import ModelDeployment
from coldstart.fleet.specification import MOST_RANKS, Costs, FleetModel
from coldstart.host.launches import Launch
from coldstart.host.live import profiles
from coldstart.models.inspection import Lookup
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.system.paths import Cache
from coldstart.units import parse_size
from coldstart.weights.load import stage, tensors

PROMPT = 512
"""Prompt tokens of the request whose time to first token is predicted."""


def parse_limits(text: str | None) -> tuple[float, float]:
    """Parse limits on TTFT and TPOT in seconds from `ttft=2,tpot=0.1`; infinite if omitted. Raises UsageError."""
    limits = {"ttft": inf, "tpot": inf}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            limits[name], given = float(value), name in limits
            if not given or not limits[name] > 0:
                raise ValueError
        except ValueError as error:
            raise UsageError(f"--slo: invalid limits {text!r}", hint="--slo ttft=2,tpot=0.1") from error
    return limits["ttft"], limits["tpot"]


def build_deployment(
    launch: Launch,
    cache: Cache,
    *,
    offline: bool,
    workers: tuple[int, int],
    slo: tuple[float, float],
    idle_s: float,
    batch: int,
    memory: str | None = None,
    size: str | None = None,
    start_s: float | None = None,
) -> ModelDeployment:
    """Return the deployment of a launch.

    Args:
        launch: What each worker starts.
        cache: Where bundles and models are looked up; `offline` forbids the network.
        offline: Whether nothing is downloaded.
        workers: Their minimum and maximum number.
        slo: Limits on TTFT and TPOT in seconds.
        idle_s: Seconds without a request after which a worker stops.
        batch: Maximum number of concurrent requests of a worker.
        memory: Device memory of a worker as typed; by default from the bundle.
        size: Size of the weights as typed; by default from the files.
        start_s: Seconds of a start without loading the weights; by default from the bundle.

    Raises:
        UsageError: A required value is unknown. A lookup may raise other errors, and NoBundleError.
    """
    found = profiles.look_up_launch(launch, cache, offline=offline)
    shares: dict[int, tuple[int, ...]] = {}
    if size:
        weights = parse_size(size)
    else:
        shares = ranks_bytes(found)
        weights = profiles.weights_bytes(found.model.path) or (shares[1][0] if shares else 0)
    if not weights:
        raise UsageError(
            f"{launch.name}: cannot determine the size of its weights: no local weights", hint="--size 24GB"
        )
    needed = parse_size(memory) if memory else 0
    if not needed or start_s is None:
        known = profiles.choose_profile(launch, found, needed)
        needed, start_s = needed or known.memory, known.start_s if start_s is None else start_s
    costs = measured_costs(found, start_s, batch)
    if slo[1] < inf and not costs.decode_s:
        raise UsageError(
            f"{launch.name}: a limit on TPOT needs the time of an iteration, and no bundle of this model has measured it",
            hint=f"coldstart materialize {launch.model}",
        )
    spec = FleetModel(
        launch.name,
        weights,
        max(needed, weights),
        costs,
        *slo,
        batch,
        *workers,
        idle_s,
        shares=shares,
    )
    return ModelDeployment(launch, spec)


def measured_costs(found: Lookup, start_s: float, batch: int) -> Costs:
    """Return the costs of a start of `start_s` seconds, with the times of PROMPT tokens and of `batch` requests.

    The times are 0 if the bundle does not record them.
    """
    try:
        profile = IterationProfile.parse(found.bundle.json("iterations")) if found.bundle else None
    except (BundleError, ProfileError):
        profile = None
    if profile is None:
        return Costs(library_s=start_s)
    return Costs(library_s=start_s, prefill_s=profile.prefill(PROMPT), decode_s=profile.decode(batch))


def ranks_bytes(found: Lookup) -> dict[int, tuple[int, ...]]:
    """Return the bytes of the tensors of each rank, by number of ranks, from the bundle; {} if it contains no such plan."""
    try:
        plan: Any = found.weights_donor.json("weights") if found.weights_donor else None
        ordered = tensors.list_tensors(plan) if isinstance(plan, Mapping) else []
    except (BundleError, tensors.UnreadableWeightsError):
        return {}
    config, size = found.model.config, {tensor.name: tensor.size for tensor in ordered}
    layers = config.get("num_hidden_layers")
    most = min(MOST_RANKS, layers) if isinstance(layers, int) and layers > 0 else 1

    def rank(number: int, count: int) -> int:
        return sum(size[name] for name in stage.select_names(list(size), config, [number], count))

    return {n: tuple(rank(one, n) for one in range(n)) for n in range(1, most + 1)} if size else {}
