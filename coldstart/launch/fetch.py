"""Where a start's weights come from, and having them on their way before the server process imports anything.

Invariant: nothing here is needed for the server to come up. What could not be begun early is done later by the loader in the
server, which says so itself; only a start that has no other weights than the ones to fetch fails without its plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.net.origin import without_secrets
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import PacedFetch, WeightsRequest
from coldstart.errors import CommandFailedError
from coldstart.models import resolution
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel, weight_files
from coldstart.system import runtime
from coldstart.vllm.weights.entry import LOAD_FORMAT
from coldstart.weights import weights_plan as weights
from coldstart.weights.load import tensors

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle
    from coldstart.weights.load.tensor_sources import PageIn
    from coldstart.weights.prefetch.client import Attached

# Local files are paged in early from this size on, in bytes. Less is read in a fraction of a second, during imports that wait
# for the same disk. A prefetcher is never started for them: the page cache is their shared memory already.
PAGE_IN_MIN_BYTES = 64 << 20


def loading(given: Arguments, model: ResolvedModel) -> list[str]:
    """Our load format for the model's local files, to stand before `given`, unless the user has chosen one there.

    Only on the CPU, where it is measured against vLLM's own, and only for the file format that it is made for.
    """
    fit = model.path is not None and all(path.suffix == ".safetensors" for path in model.weight_files)
    return _format(given) if fit and runtime.targets_cpu() else []


def _format(given: Arguments) -> list[str]:
    return [] if given.gives("load_format") else ["--load-format", LOAD_FORMAT]


@dataclass(frozen=True)
class Weights:
    """Where a server's weights come from: the model, vLLM's arguments that name it, and the request for another source.

    `identity` is the digest of the weights, "" where no bundle has to be compared with it.
    """

    model: ResolvedModel
    arguments: Arguments
    identity: str = ""
    request: WeightsRequest | None = None
    fallbacks: Sequence[Fallback] = ()


def choose(
    lookup: Lookup,
    source: str | None = None,
    pace: PacedFetch | None = None,
    listen: Sequence[str] = (),
) -> Weights:
    """Return where the weights come from: `source`, by the plan in a bundle, or the files in the model's directory.

    `listen` are vLLM's arguments for the address to listen at. Raises CommandFailedError where the bundle does not say which
    weights
    to fetch, or for weights that are not safetensors.
    """
    donor = lookup.weights_donor if source is not None else None
    plan = None if donor is None else _weights_plan(donor)
    ensure = resolution.ensure_weights if plan is None else resolution.ensure_tokenizer
    model, given = ensure(lookup.model, offline=lookup.offline), lookup.vllm_args
    own = loading(given, model) if plan is None else _streaming(given, model, plan)
    request, identity, fallbacks = None, "", list[Fallback]()
    if source is not None and plan is not None:
        path, identity = weights.keep(plan, lookup.cache.weights / "plans")
        request = WeightsRequest(source, path, pace)
    elif lookup.bundle is not None and model.path is not None:
        identity = weights.identity(model.path, lookup.cache.weights)
    if source is not None and plan is None:
        reason = f"no bundle says what {without_secrets(source)} must hold: the model's own directory is read"
        fallbacks = [Fallback("weights", reason)]
    arguments = given.prepend_model(str(model.path), model.name).prepend(*own).append(*listen)
    return Weights(model, arguments, identity, request, fallbacks)


def _streaming(given: Arguments, model: ResolvedModel, plan: Mapping[str, Any]) -> list[str]:
    """Return our arguments for weights that are fetched by `plan`."""
    return [*_format(given), *_untied(model.config, _names(plan), given)]


def _weights_plan(bundle: Bundle) -> Mapping[str, Any]:
    try:
        known = bundle.json("weights")
    except BundleError as error:
        known = error
    if isinstance(known, Mapping) and isinstance(known.get("files"), list):
        return known
    raise CommandFailedError(
        f"{bundle.ref} does not say which weights to fetch.",
        hint="where the weights are: coldstart materialize MODEL --only weights --force",
    )


def _names(plan: Mapping[str, Any]) -> list[str]:
    try:
        return [tensor.name for tensor in tensors.ordered(plan)]
    except tensors.UnreadableWeightsError as error:
        raise CommandFailedError(
            f"These weights cannot be fetched: {error}.", hint="leave --weights-from away"
        ) from error


def _untied(config: Mapping[str, Any], names: Sequence[str], given: Arguments) -> list[str]:
    """What vLLM would find out from weights in the model's directory: a checkpoint's own head is not tied to anything."""
    own = any(name.startswith("lm_head.") for name in names) and config.get("tie_word_embeddings", True)
    if not own or given.gives("hf_overrides"):
        return []
    return ["--hf-overrides", json.dumps({"tie_word_embeddings": False})]


class Ahead:
    """What is on its way for a server that starts, until `close`."""

    def __init__(self, close: Callable[[], None] = lambda: None, *, headless: bool = False) -> None:
        self._close, self._headless, self._lasts = close, headless, False

    def started(self) -> None:
        """The server is up. A pipeline's later node says so before it loads: the prefetcher is to go on until it does."""
        self._lasts = self._headless

    def end(self) -> None:
        """The block is left."""
        if not self._lasts:
            self._close()


@contextmanager
def begun(plan: LaunchPlan, config: Mapping[str, Any]) -> Iterator[Ahead]:
    """Within the block the weights are on their way to a server that loads them itself.

    Beyond it, as long as somebody holds what it gives, for a server that has `started` and loads them later.
    """
    given = plan.vllm_args
    if given.value("load_format") != LOAD_FORMAT:
        yield Ahead()
        return
    if asked := plan.weights_from:
        from coldstart.weights.prefetch import client

        try:
            names = _node_names(asked.read(), config, given)
            early = client.start_early(asked.source, asked.read(), names, pace=asked.pace)
        except client.PrefetchError:
            yield Ahead()  # the loader will try again, and say why it fails
            return
        ahead = Ahead(early.close, headless=given.gives("headless"))
        try:
            yield ahead
        finally:
            ahead.end()
        return
    reading = _page_in(Path(str(given.value("model", ""))), config, given)
    try:
        yield Ahead()
    finally:
        if reading is not None:
            reading.end()


def _page_in(model: Path, config: Mapping[str, Any], given: Arguments) -> PageIn | None:
    by_name = {path.name: path for path in weight_files(model) if path.suffix == ".safetensors"}
    if sum(path.stat().st_size for path in by_name.values()) < PAGE_IN_MIN_BYTES:
        return None
    from coldstart.weights.load.tensor_sources import PageIn

    plan = weights.headers(by_name.values())
    return PageIn(by_name, tensors.only(tensors.ordered(plan), _node_names(plan, config, given)))


def _node_names(plan: Mapping[str, Any], config: Mapping[str, Any], given: Arguments) -> list[str]:
    """The tensors that the pipeline ranks of this node need, in load order."""
    names = [tensor.name for tensor in tensors.ordered(plan)]
    size, tensor, nodes, node = (
        given.number(name, default)
        for name, default in (
            ("pipeline_parallel_size", 1),
            ("tensor_parallel_size", 1),
            ("nnodes", 1),
            ("node_rank", 0),
        )
    )
    if given.gives("speculative_config"):
        return names
    from coldstart.weights.load import stage

    try:
        ranks = stage.local_ranks(size, tensor, nodes, node)
        return stage.needed(names, config, ranks, size, os.environ.get(stage.PARTITION_ENV))
    except (ValueError, LookupError, ArithmeticError):
        return names  # vLLM will refuse such ranks or such a partition, in its own words


def rest(plan: LaunchPlan, config: Mapping[str, Any]) -> Attached:
    """Have what this node's ranks do not need fetched in the background.

    The lease keeps it: close it when nobody will want the rest any more. Raises client.PrefetchError saying why there is none.
    """
    from coldstart.weights.prefetch import client

    asked = plan.weights_from
    if asked is None:
        raise client.PrefetchLostError(
            "the weights are not fetched by a prefetcher: --weights-from names a source"
        )
    known = asked.read()
    needed = set(_node_names(known, config, plan.vllm_args))
    others = [tensor.name for tensor in tensors.ordered(known) if tensor.name not in needed]
    return client.attach(asked.source, known, names=others, background=True, start=False)
