"""Convert the arguments of `fleet deploy` to a deployment, with values from the bundle, the weights or the command line.

The start that verified the bundle gives the times of a start: until the weights, beside which the fetch runs, and from the
weights to ready. Its full duration counts as the former if the bundle does not divide it. Prefill and decode times are those of
the bundle's measured iterations. A pipeline has only a number of ranks for which there is a bundle: without one the time of
their start, in which they compile, is not known. The fleet measures the hop between each pair of servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.errors import UsageError
from coldstart.fleet.live.orders import build_rank_arguments
from coldstart.fleet.live.state import ModelDeployment
from coldstart.fleet.specification import MOST_RANKS, Costs, FleetModel
from coldstart.host.launches import Launch
from coldstart.host.live import profiles
from coldstart.models import inspection, keys
from coldstart.models.inspection import Lookup
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.units import parse_size
from coldstart.weights import checkpoint
from coldstart.weights.load import stage

PROFILE_PROMPT_TOKENS = 512
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
        shares = read_rank_sizes(found)
        weights = profiles.weights_bytes(found.model.path) or (shares[1][0] if shares else 0)
    if not weights:
        raise UsageError(
            f"{launch.name}: cannot determine the size of its weights: no local weights", hint="--size 24GB"
        )
    needed, recorded = parse_size(memory) if memory else 0, dict[int, float]()
    if not needed or start_s is None:
        known = profiles.choose_profile(launch, found, needed)
        needed = needed or known.memory
        if start_s is None:
            after_s, load_s = read_stages(found.bundle)
            start_s = max(0.0, known.start_s - after_s - load_s)
            recorded[1] = after_s
    costs = read_costs(found, start_s, batch)
    pipelines, unavailable = look_up_pipelines(launch, found, start_s)
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
        recorded=recorded | pipelines,
        unavailable=unavailable,
        # vLLM's CPU engines share what a rank and its full worker have in common; engines on a GPU do not yet.
        held_twice=0.0 if runtime.targets_cpu() else 1.0,
    )
    return ModelDeployment(launch, spec)


def read_costs(found: Lookup, start_s: float, batch: int) -> Costs:
    """Return the costs of a start of `start_s` seconds, with the times of PROMPT tokens and of `batch` requests.

    The times are 0 if the bundle does not record them.
    """
    try:
        profile = IterationProfile.parse(found.bundle.read_json("iterations")) if found.bundle else None
    except (BundleError, ProfileError):
        profile = None
    if profile is None:
        return Costs(library_s=start_s)
    return Costs(library_s=start_s, prefill_s=profile.prefill(PROFILE_PROMPT_TOKENS), decode_s=profile.decode(batch))


# Steps of a start that follow the weights, and the step that loads them, as the starting server names them.
_STAGES_AFTER_WEIGHTS = (
    "compile the model or size the KV cache",
    "allocate the KV cache",
    "compile or warm up",
    "first token",
)
_LOAD_STAGE = "load the model"


def read_stages(bundle: Bundle | None, ranks: int = 1) -> tuple[float, float]:
    """Return the seconds after the weights and those of loading them, in the start of `ranks` ranks that verified the bundle.

    Both are 0 if the bundle does not divide its start. The spans of all ranks are recorded as sums.
    """
    try:
        stages: Any = bundle.read_json("stages") if bundle else {"spans": {}}
        spans = stages["spans"]
        after = sum(float(spans.get(name, 0.0)) for name in _STAGES_AFTER_WEIGHTS) / ranks
        return after, float(spans.get(_LOAD_STAGE, 0.0)) / ranks
    except (BundleError, AttributeError, KeyError, TypeError, ValueError):
        return 0.0, 0.0


def look_up_pipelines(
    launch: Launch, found: Lookup, library_s: float
) -> tuple[dict[int, float], dict[int, str]]:
    """Return the seconds from loaded weights to ready of the pipelines that have a bundle, by number of ranks.

    Also returns the reasons why the other numbers of ranks cannot start. `library_s` are the seconds of a single worker
    until its weights: what a pipeline needs in addition counts after them.
    """
    seconds, reasons, counts = dict[int, float](), dict[int, str](), range(2, MOST_RANKS + 1)
    if found.vllm_args.number("pipeline_parallel_size", 1) > 1:
        return seconds, dict.fromkeys(counts, "the arguments of the model set --pipeline-parallel-size")
    for ranks in counts:
        args = build_rank_arguments(found.vllm_args, ranks)
        key = keys.compose(found.model, args)
        pipeline = replace(found, vllm_args=args, key=key, bundle=None, nearest=None).refresh()
        if launch.weights_from and not found.model.weight_files:
            pipeline = pipeline.drop_weights()
        proof = None if pipeline.bundle is None else inspection.read_proof(pipeline.bundle)
        if proof is None:
            reasons[ranks] = f"no bundle: {pipeline.format_materialize()}"
            continue
        _, load_s = read_stages(pipeline.bundle, ranks)
        seconds[ranks] = max(0.0, proof.ready_s - load_s - library_s)
    return seconds, reasons


def read_rank_sizes(found: Lookup) -> dict[int, tuple[int, ...]]:
    """Return the bytes of the tensors of each rank, by number of ranks, from the bundle; {} if it contains no such plan."""
    try:
        plan: Any = found.weights_donor.read_json("weights") if found.weights_donor else None
        ordered = checkpoint.list_tensors(plan) if isinstance(plan, Mapping) else []
    except (BundleError, checkpoint.UnreadableWeightsError):
        return {}
    config, size = found.model.config, {tensor.name: tensor.size for tensor in ordered}
    layers = config.get("num_hidden_layers")
    most = min(MOST_RANKS, layers) if isinstance(layers, int) and layers > 0 else 1

    def rank(number: int, count: int) -> int:
        return sum(size[name] for name in stage.select_names(list(size), config, [number], count))

    return {n: tuple(rank(one, n) for one in range(n)) for n in range(1, most + 1)} if size else {}
