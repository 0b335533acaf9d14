"""Choose the source of a server's weights, and start fetching them before the server process imports vLLM.

Invariant: fetching early is an optimization. If it fails, the loader in the server fetches again and logs the error. Only a
start without local weights fails if the bundle has no weights plan.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.net.origin import redact_url
from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import VLLM_PP_LAYER_PARTITION
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import LimitedFetch, WeightsRequest
from coldstart.errors import CommandFailedError
from coldstart.models import inspection, resolution
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel, weight_files
from coldstart.system import paths, runtime, secrets
from coldstart.vllm import gpu_starts
from coldstart.vllm.weights.entry import LOAD_FORMAT
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights

if TYPE_CHECKING:
    from coldstart.weights.load.tensor_sources import PageIn

# Page in local files early if they have at least this many bytes. Smaller files are read in a fraction of a second, during
# imports that wait for the same disk. Local files need no prefetcher, because the page cache is already shared memory.
PAGE_IN_MIN_BYTES = 64 << 20
# Value of `--weights-from` for the weights that a `vllm preload` daemon keeps on the device.
PRELOADED = "preload"
# Name of a package, and of the vLLM load format that needs it.
INSTANT_TENSOR = "instanttensor"


def build_loader_arguments(given: Arguments, model: ResolvedModel) -> list[str]:
    """Return the arguments that select the fastest loader for local safetensors files, or none if `given` selects a format.

    On the CPU, this is coldstart's own load format. On an NVIDIA GPU, it is InstantTensor (`--load-format instanttensor`) if
    its package is installed, and vLLM's default otherwise.
    """
    if model.path is None or any(path.suffix != ".safetensors" for path in model.weight_files):
        return []
    if runtime.targets_cpu():
        return _format(given)
    has_loader = runtime.read_torch_build().get("cuda") and find_spec(INSTANT_TENSOR)
    return _format(given, INSTANT_TENSOR) if has_loader else []


def _format(given: Arguments, name: str = LOAD_FORMAT) -> list[str]:
    return [] if given.contains_flag("load_format") else ["--load-format", name]


@dataclass(frozen=True)
class ServerWeights:
    """Source of a server's weights: the model, the vLLM arguments that select the source, and a remote source if there is one.

    `identity` is the digest of the weights or, without a bundle, of the sizes, times and inodes of their files.
    """

    model: ResolvedModel
    arguments: Arguments
    identity: str = ""
    request: WeightsRequest | None = None
    fallbacks: Sequence[Fallback] = ()


def choose_weights_source(
    lookup: BundleLookup,
    source: str | None = None,
    rate_limit: LimitedFetch | None = None,
    listen: Sequence[str] = (),
    trust: TrustCheck = inspection.trust,
) -> ServerWeights:
    """Choose the source of the weights: `source` with a bundle's weights plan, or the model's local files.

    Args:
        lookup: Model, vLLM arguments and bundle.
        source: URL or directory from which to fetch the weights, PRELOADED, or None for the model's own directory.
        rate_limit: Name and rate limit of the fetch, if any.
        listen: vLLM arguments for the listening address.
        trust: Decides which bundles may vouch for preloaded weights.

    Raises:
        CommandFailedError: The bundle has no weights plan, or the weights are not safetensors.
    """
    donor = lookup.weights_donor if source not in (None, PRELOADED) else None
    plan = None if donor is None else _read_weights_plan(donor)
    ensure = resolution.ensure_weights if plan is None else resolution.ensure_tokenizer
    model, given = ensure(lookup.model, offline=lookup.offline), lookup.vllm_args
    if plan is None:
        own = build_loader_arguments(given, model)
    else:  # coldstart's own arguments for weights that are fetched with the plan
        own = [*_format(given), *_untie_head(model.config, _list_tensors(plan), given)]
    request, identity, fallbacks = None, "", list[Fallback]()
    if source is not None and plan is not None:
        request = WeightsRequest(source, weights.save_plan(plan, lookup.cache.weights / "plans"), rate_limit)
        identity = weights.compute_digest(plan)
    elif model.path is not None and lookup.bundle is not None:
        identity = weights.read_or_compute_digest(model.path, lookup.cache.weights)
    elif model.path is not None:
        # Without a bundle, reading all weights for their digest would delay the start.
        identity = weights.digest_stamp(model.path)
    if source == PRELOADED:
        fallbacks, own = _take_preloaded(lookup, model, own, trust)
    elif source is not None and donor is None:
        reason = f"no bundle has a weights plan for {redact_url(source)}, so the weights are read from the model's directory"
        fallbacks = [Fallback("weights", reason)]
    # `vllm serve` serves a model under the repository or directory that was typed.
    names = dict.fromkeys((model.name, model.repo_id or str(model.path)))
    arguments = given.prepend_model(str(model.path), *names).prepend(*own).append(*listen)
    return ServerWeights(model, arguments, identity, request, fallbacks)


def _take_preloaded(
    lookup: BundleLookup, model: ResolvedModel, own: list[str], trust: TrustCheck
) -> tuple[list[Fallback], list[str]]:
    """Return the vLLM arguments that map the weights of a `vllm preload` daemon, or `own` and a fallback with the reason.

    `own` are the arguments that load the model's local files. The directory of the daemon's sockets is named by the digest
    of the weights: vLLM compares only file headers, and would accept a base model's weights for a fine-tune (vllm#59647).
    Only the canary of the bundle checks what the daemon holds, so the bundle must be trusted.
    """
    limit = gpu_starts.find_preload_limit(lookup.vllm_args, on_cpu=runtime.targets_cpu())
    if limit is None and (lookup.bundle is None or model.path is None):
        limit = "no bundle contains the digest of the weights", lookup.format_command("materialize")
    if limit is None and lookup.bundle is not None and not (judged := trust(lookup.bundle)).is_trusted:
        limit = (
            f"the bundle is not trusted: {judged.reason}",
            "run `coldstart trust add FILE` with the signer's public key",
        )
    if limit is None and model.path is not None:
        digest = weights.read_or_compute_digest(model.path, lookup.cache.weights)
        place = paths.runtime_dir() / f"preload-{digest.removeprefix('sha256:')[:16]}"
        if any(place.glob("*.sock")):
            return [], gpu_starts.build_preload_arguments(place)
        daemon = gpu_starts.build_preload_daemon_command(
            model.path, place, secrets.redact_arguments(lookup.vllm_args)
        )
        limit = "no vllm preload daemon has these weights", shlex.join(daemon)
    assert limit is not None
    return [Fallback("weights", f"{limit[0]}, so the model's directory is read instead", limit[1])], own


def _read_weights_plan(bundle: Bundle) -> Mapping[str, Any]:
    try:
        known = bundle.read_json("weights")
    except BundleError as error:
        known = error
    if isinstance(known, Mapping) and isinstance(known.get("files"), list):
        return known
    raise CommandFailedError(
        f"the bundle {bundle.ref} has no usable weights plan",
        hint="run `coldstart materialize MODEL --force` on a machine that has the weights",
    )


def _list_tensors(plan: Mapping[str, Any]) -> list[str]:
    try:
        return [tensor.name for tensor in checkpoint.list_tensors(plan)]
    except checkpoint.UnreadableWeightsError as error:
        raise CommandFailedError(f"cannot fetch the weights: {error}", hint="omit --weights-from") from error


def _untie_head(config: Mapping[str, Any], names: Sequence[str], given: Arguments) -> list[str]:
    """Return the config override for a checkpoint that has its own LM head, which vLLM detects only in local weights."""
    own = any(name.startswith("lm_head.") for name in names) and config.get("tie_word_embeddings", True)
    if not own or given.contains_flag("hf_overrides"):
        return []
    return ["--hf-overrides", json.dumps({"tie_word_embeddings": False})]


@contextmanager
def start_early_fetch(plan: LaunchPlan, config: Mapping[str, Any]) -> Iterator[ExitStack]:
    """Fetch the weights, or read local ones into the page cache, while the block starts a server that loads them.

    The fetch stops at the end of the block. If the server loads its weights later, the caller takes the fetch over from the
    yielded ExitStack with `pop_all`, and closes it when the server has loaded them.
    """
    given, early, reading = plan.vllm_args, ExitStack(), None
    is_ours = given.get_value("load_format") == LOAD_FORMAT
    if is_ours and (asked := plan.weights_from):
        from coldstart.weights.prefetch import PrefetchError, client

        with suppress(PrefetchError):  # the loader repeats the fetch and logs the error
            known = asked.read()
            names = _list_node_tensors(known, config, given)
            early.callback(
                client.start_early_fetch(asked.source, known, names, rate_limit=asked.rate_limit).close
            )
    elif is_ours:
        reading = _page_in(Path(str(given.get_value("model", ""))), config, given)
    try:
        with early:
            yield early
    finally:
        if reading is not None:
            reading.end()


def _page_in(model: Path, config: Mapping[str, Any], given: Arguments) -> PageIn | None:
    by_name = {path.name: path for path in weight_files(model) if path.suffix == ".safetensors"}
    if sum(path.stat().st_size for path in by_name.values()) < PAGE_IN_MIN_BYTES:
        return None
    from coldstart.weights.load.tensor_sources import PageIn

    plan = weights.build_plan_from_headers(by_name.values())
    try:
        every = checkpoint.list_tensors(plan)
    except checkpoint.UnreadableWeightsError:
        return None  # vLLM's own loader reads these files
    return PageIn(by_name, checkpoint.select_tensors(every, _list_node_tensors(plan, config, given)))


def _list_node_tensors(plan: Mapping[str, Any], config: Mapping[str, Any], given: Arguments) -> list[str]:
    names = [tensor.name for tensor in checkpoint.list_tensors(plan)]
    size, tensor, nodes, node = (
        given.get_integer(name, default)
        for name, default in (
            ("pipeline_parallel_size", 1),
            ("tensor_parallel_size", 1),
            ("nnodes", 1),
            ("node_rank", 0),
        )
    )
    if given.contains_flag("speculative_config"):
        return names
    from coldstart.weights.load import stage

    try:
        ranks = stage.list_local_ranks(size, tensor, nodes, node)
        return stage.select_tensor_names(names, config, ranks, size, os.environ.get(VLLM_PP_LAYER_PARTITION))
    except (ValueError, LookupError, ArithmeticError):
        return names  # vLLM rejects invalid ranks and partitions itself
