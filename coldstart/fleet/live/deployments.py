"""Build deployments for `fleet deploy` from the command line, the bundle and the weights.

The bundle's verification run measures two parts of the start time: the part that overlaps with the weight fetch, and the
part after the weights are loaded. If the bundle does not record stages, all of the start time counts as the first part.
The prefill and decode times come from the profiled iterations in the bundle. A pipeline size is used only if a bundle exists
for it, because starting without one compiles, which takes an unknown time. The fleet itself measures the network latency
between servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from coldstart.artifacts.errors import BundleError
from coldstart.contract.environment import SHARE_GPU_WEIGHTS
from coldstart.errors import UsageError
from coldstart.fleet.live.orders import build_rank_arguments
from coldstart.fleet.live.state import ModelDeployment
from coldstart.fleet.specification import MOST_RANKS, Costs, DeployOptions, FleetModel, parse_slo
from coldstart.host.launches import Launch
from coldstart.host.live import profiles
from coldstart.models import inspection, keys
from coldstart.models.inspection import BundleLookup, VerificationStart
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.units import parse_size
from coldstart.weights import checkpoint
from coldstart.weights.load import stage

PROFILE_PROMPT_TOKENS = 512
"""Prompt length for which the time to first token is predicted, in tokens."""


def build_deployment(
    launch: Launch, options: DeployOptions, cache: Cache, *, offline: bool
) -> ModelDeployment:
    """Build the deployment of a model from the launch of each worker. `offline` permits only local files.

    All workers start from the commit that a hub model has now, because a stream may move between workers.

    Raises:
        UsageError: A required value is unknown.
        NoBundleError: A value must come from a bundle, but there is none.
    """
    limits, start_s = parse_slo(options.slo or "", ("ttft", "tpot")), options.start_s
    found = profiles.look_up_required_bundle(launch, cache, offline=offline)
    shares: dict[int, tuple[int, ...]] = {}
    if options.size:
        weights = parse_size(options.size)
    else:
        shares = read_rank_sizes(found)
        weights = profiles.measure_weights(found.model.path) or (shares[1][0] if shares else 0)
    if not weights:
        raise UsageError(
            f"model {launch.name}: the size of the weights is unknown, because the weights are not on this machine",
            hint="specify the size of the weights, such as --size 24GB",
        )
    needed, recorded = parse_size(options.memory) if options.memory else 0, dict[int, float]()
    if not needed or start_s is None:
        start = None if found.bundle is None else inspection.read_verification_start(found.bundle)
        known = profiles.choose_profile(launch, found, needed)
        needed = needed or limit_memory(start, known.memory, options.batch)
        if start_s is None:
            after_s, load_s = compute_stages(start)
            start_s = max(0.0, known.start_s - after_s - load_s)
            recorded[1] = after_s
    costs = read_costs(found, start_s, options.batch)
    pipelines, unavailable = look_up_pipelines(launch, found, start_s)
    if "tpot" in limits and not costs.decode_s:
        raise UsageError(
            f"model {launch.name}: a TPOT limit requires measured step latencies, but no bundle of the model has them",
            hint=f"run `coldstart materialize {launch.model}`",
        )
    spec = FleetModel(
        launch.name,
        weights,
        max(needed, weights),
        costs,
        limits.get("ttft", inf),
        limits.get("tpot", inf),
        options.batch,
        options.least,
        options.most,
        options.idle_s,
        shares=shares,
        recorded=recorded | pipelines,
        unavailable=unavailable,
        # CPU engines share the weights that a rank and its full worker both use.
        held_twice=0.0 if runtime.targets_cpu() else 1.0,
    )
    if spec.held_twice and SHARE_GPU_WEIGHTS.read() and can_share_gpu_weights(launch, found):
        spec = replace(spec, held_twice=compute_held_twice(spec))
    return ModelDeployment(replace(launch, revision=found.model.revision), spec)


def limit_memory(start: VerificationStart | None, most: int, batch: int) -> int:
    """Return the memory in bytes for a worker on a GPU: the smallest, and KV cache for `batch` requests of full length.

    It is at most `most`. By default vLLM uses nearly the whole GPU, which then has no memory for the engine that replaces a
    pipeline. It is `most` on the CPU, and if the bundle does not record what a worker needs at least.
    """
    if not start or not start.device_floor_bytes or not start.kv_floor_bytes:
        return most
    return min(most, start.device_floor_bytes + (batch - 1) * start.kv_floor_bytes)


def can_share_gpu_weights(launch: Launch, found: BundleLookup) -> bool:
    """Return whether a rank and its full worker on a GPU can share the weights, which coldstart must fetch.

    vLLM changes quantized weights, and those of experts, after loading.
    """
    config = {**found.model.config, **(found.model.config.get("text_config") or {})}
    is_changed = any("quantization" in name or "expert" in name for name, value in config.items() if value)
    excluded = any(map(found.vllm_args.contains_flag, _NOT_WITH_SHARED_WEIGHTS))
    return bool(launch.weights_from) and not is_changed and not excluded


_NOT_WITH_SHARED_WEIGHTS = (
    "quantization", "tensor_parallel_size", "speculative_config", "load_format", "enable_sleep_mode", "enable_cumem_allocator",
)  # fmt: skip


def compute_held_twice(model: FleetModel) -> float:
    """Return the largest fraction of a rank's memory that is not its weights, over all pipelines."""
    counts = range(2, MOST_RANKS + 1)
    return max(1 - min(model.ranks(count)) / model.part(count) for count in counts)


def read_costs(found: BundleLookup, start_s: float, batch: int) -> Costs:
    """Return the costs of a model that starts in `start_s` seconds, with the prefill and decode times that the bundle records.

    These times are for PROFILE_PROMPT_TOKENS prompt tokens and `batch` requests, and are 0 if the bundle does not record
    them.
    """
    try:
        profile = IterationProfile.parse(found.bundle.read_json("iterations")) if found.bundle else None
    except (BundleError, ProfileError):
        profile = None
    if profile is None:
        return Costs(library_s=start_s)
    return Costs(
        library_s=start_s, prefill_s=profile.prefill(PROFILE_PROMPT_TOKENS), decode_s=profile.decode(batch)
    )


# Names of start stages in the bundle: the stages after the weights, and the stage that loads the weights.
_STAGES_AFTER_WEIGHTS = (
    "compile the model or size the KV cache",
    "allocate the KV cache",
    "compile or warm up",
    "first token",
)
_LOAD_STAGE = "load the model"


def compute_stages(start: VerificationStart | None, ranks: int = 1) -> tuple[float, float]:
    """Return two times in seconds per rank of a bundle's verification run: after loading the weights, and for loading them.

    Both are 0 if the bundle does not record stages. The bundle records their sums over the `ranks` ranks of the run.
    """
    spans = start.spans if start else {}
    after_s = sum(spans.get(name, 0.0) for name in _STAGES_AFTER_WEIGHTS)
    return after_s / ranks, spans.get(_LOAD_STAGE, 0.0) / ranks


def look_up_pipelines(
    launch: Launch, found: BundleLookup, library_s: float
) -> tuple[dict[int, float], dict[int, str]]:
    """Return, for each pipeline size with a bundle, the seconds from loaded weights to ready.

    Also return, for each other pipeline size, why it cannot start. `library_s` is the time in seconds that a single
    worker takes before it can load weights. If a pipeline takes longer, the rest counts as time after loading the weights.
    """
    seconds, reasons, counts = dict[int, float](), dict[int, str](), range(2, MOST_RANKS + 1)
    if found.vllm_args.get_integer("pipeline_parallel_size", 1) > 1:
        return seconds, dict.fromkeys(counts, "the model's arguments already set --pipeline-parallel-size")
    for ranks in counts:
        args = build_rank_arguments(found.vllm_args, ranks)
        key = keys.compose_key(found.model, args)
        pipeline = replace(found, vllm_args=args, key=key, bundle=None, nearest=None).refresh()
        if launch.weights_from and not found.model.weight_files:
            pipeline = pipeline.accept_nearest_without_weights()
        start = None if pipeline.bundle is None else inspection.read_verification_start(pipeline.bundle)
        if start is None:
            reasons[ranks] = f"no bundle exists (run `{pipeline.format_command('materialize')}`)"
            continue
        _, load_s = compute_stages(start, ranks)
        seconds[ranks] = max(0.0, start.ready_s - load_s - library_s)
    return seconds, reasons


def read_rank_sizes(found: BundleLookup) -> dict[int, tuple[int, ...]]:
    """Return the weight bytes of each rank by number of ranks, or an empty dict if no bundle has a usable weight plan."""
    try:
        plan: Any = found.weights_donor.read_json("weights") if found.weights_donor else None
        ordered = checkpoint.list_tensors(plan) if isinstance(plan, Mapping) else []
    except (BundleError, checkpoint.UnreadableWeightsError):
        return {}
    config, size = found.model.config, {tensor.name: tensor.size for tensor in ordered}
    layers = config.get("num_hidden_layers")
    most = min(MOST_RANKS, layers) if isinstance(layers, int) and layers > 0 else 1

    def rank(number: int, count: int) -> int:
        return sum(size[name] for name in stage.select_tensor_names(list(size), config, [number], count))

    return {n: tuple(rank(one, n) for one in range(n)) for n in range(1, most + 1)} if size else {}
