"""Load format `coldstart`: vLLM's default loader, which receives a view of each tensor as soon as its bytes arrive.

The loader reads the prefetcher's shared memory if a fetch was requested, and then the files. If the files fail without such a
request, vLLM's own loader reads the remaining tensors; it verifies no digest, so after a failed fetch the load fails instead.
Only the tensors of this pipeline rank are read. A tensor-parallel slice of a view reads only its own pages.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig, get_current_vllm_config
from vllm.config.utils import replace
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from coldstart.contract.environment import VLLM_PP_LAYER_PARTITION, WEIGHTS_SOCKET
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import LostWeightsError
from coldstart.errors import ColdstartError
from coldstart.graphs.errors import DriverError
from coldstart.models.checkpoint_files import Tensor
from coldstart.system import timeline
from coldstart.system.ipc.peers import PeerError
from coldstart.vllm import compat
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights
from coldstart.weights.checkpoint import UnreadableWeightsError
from coldstart.weights.load import ladder, stage
from coldstart.weights.load.ladder import NoLoaderLeftError, Rung, load_tensors
from coldstart.weights.load.tensor_sources import FileSource, PrefetchSource, SourceLostError, TensorSource

logger = logging.getLogger("vllm.coldstart.loader")

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
# Attributes of a model that make vLLM choose or filter files by the model's own rules.
_OWN_RULES = ("allow_patterns_overrides", "secondary_weights", "is_unused_checkpoint_weight")


class ColdLoader(DefaultModelLoader):
    """vLLM's default loader, changed to read tensors from the prefetcher's shared memory or directly from the files."""

    def __init__(self, load_config: LoadConfig) -> None:
        # When vLLM reads files itself, it must use its default format instead of our name.
        super().__init__(replace(load_config, load_format="auto"))
        self.report = ladder.begin_report()

    def download_model(self, model_config: ModelConfig) -> None:
        """Download the model as vLLM does, unless a prefetcher fetches the weights."""
        if LaunchPlan.current().weights_from is None:
            super().download_model(model_config)

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Return the bytes of weights that a rank on this GPU shares with this full worker, which vLLM then does not claim."""
        if vllm_config.parallel_config.world_size == 1:
            _share_gpu_weights()
        return sharer.offered_bytes if (sharer := _find_sharer(on_gpu=True)) else 0

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Create the model as vLLM does, without memory for weights that a rank on this GPU may share."""
        sharer = _find_sharer(on_gpu=True)
        with sharer.defer_allocation() if sharer else nullcontext():
            return super().create_model(vllm_config, model_config, prefix)

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        """Load the model as vLLM does. A rank on a GPU then offers its weights to the full worker that replaces it."""
        model = super().load_model(vllm_config, model_config, prefix)
        if vllm_config.parallel_config.world_size > 1:
            _share_gpu_weights(model)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load the weights as vLLM does, and report their sources and the duration."""
        if ladder.before_fetched is not None and LaunchPlan.current().weights_from is not None:
            ladder.before_fetched(model)
        began = timeline.now()
        super().load_weights(model, model_config)
        if sharer := _find_sharer(on_gpu=True):
            sharer.complete_load(model)
        self.report.seconds = timeline.now() - began
        timeline.emit_span("read tensors", began, timeline.now(), track="engine", args=self.report.document())
        logger.info("coldstart: %s", self.report)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the name and a view of each tensor of this rank in load order. A view is valid while it is referenced."""
        # vLLM's own log line reports the time since this point.
        self.counter_before_loading_weights: float = time.perf_counter()
        try:
            if reason := self._find_exclusion(model):
                raise UnreadableWeightsError(reason)
            wanted = _RankTensors(self, model_config)
        except (ColdstartError, OSError, ValueError) as error:
            yield from self._load_with_vllm(model_config, model, None, str(error))
            return
        try:
            loaded = load_tensors(wanted.tensors, wanted.rungs, self.report)
            yield from _watch(model, wanted.tensors, ((one.name, _shaped(one, view)) for one, view in loaded))
        except NoLoaderLeftError as error:
            if wanted.asked is not None:  # vLLM's own reader verifies no digest
                raise LostWeightsError(f"cannot load the weights: {error}") from error
            yield from self._load_with_vllm(
                model_config, model, {tensor.name for tensor in error.left}, str(error)
            )

    def _find_exclusion(self, model: torch.nn.Module) -> str | None:
        """Return the reason why vLLM must load this model's weights itself, or None if our sources can be used."""
        if self.local_expert_ids is not None or self._encoder_only_lm_prefixes is not None:
            return "vLLM filters the tensors of this model itself"
        if self.load_config.safetensors_load_strategy == "torchao":
            return "torchao rebuilds its tensors itself"
        own = next((name for name in _OWN_RULES if getattr(model, name, None)), None)
        return f"the model class sets {own}, so vLLM must load the weights itself" if own else None

    def _load_with_vllm(
        self, model_config: ModelConfig, model: torch.nn.Module, left: set[str] | None, reason: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        logger.warning("coldstart: vLLM's own loader reads the weights: %s", reason)
        self.report.way = "vllm"
        self.report.add_fallback(f"vLLM's own loader reads the weights: {reason}")
        tensors = super().get_all_weights(model_config, model)
        yield from _watch(model, (), (one for one in tensors if left is None or one[0] in left))


def _share_gpu_weights(rank_model: torch.nn.Module | None = None) -> None:
    """Share the weights of a GPU between a rank and the full worker that replaces it, if this is one. Record why that fails."""
    if current_platform.is_cpu() or not WEIGHTS_SOCKET.read():
        return

    def share() -> None:
        from coldstart.vllm.weights import sharing

        sharing.share_gpu_weights(rank_model)

    try:
        reason = compat.find_unsupported_reason("sharing", share)
    except (PeerError, OSError, DriverError) as error:
        reason = str(error)
    if reason:
        compat.record_fallback("sharing", f"this worker has its own copy of the weights: {reason}")


def _watch(
    model: torch.nn.Module, expected: Sequence[Tensor], loaded: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return `loaded`, the `expected` tensors with their names. A full worker that shares weights watches them."""
    sharer = _find_sharer()
    return sharer.watch(model, [one.name for one in expected], loaded) if sharer else iter(loaded)


def _find_sharer(*, on_gpu: bool = False) -> Any:
    """Return the full worker that is loading shared weights in this process, or None. `on_gpu`: only if it is on a GPU."""
    module = sys.modules.get("coldstart.vllm.weights.sharing")  # only a worker that shares weights imports it
    return None if module is None or (on_gpu and current_platform.is_cpu()) else module.get_loading_worker()


class _RankTensors:
    """Tensors of this rank, and their possible sources. `paths` is None if there are no files."""

    def __init__(self, loader: ColdLoader, model_config: ModelConfig) -> None:
        launched = LaunchPlan.current()
        # A draft model has other weights, and vLLM can reload those of another path.
        is_launched = model_config.model == launched.vllm_args.get_value("model")
        self.asked = launched.weights_from if is_launched else None
        self.plan = self.asked.read() if self.asked else None
        self.paths = _files(loader, model_config, optional=self.plan is not None)
        if self.plan is None:
            self.plan = weights.build_plan_from_headers((self.paths or {}).values())
        every = checkpoint.list_tensors(self.plan)
        if strange := next((tensor.dtype for tensor in every if tensor.dtype not in DTYPES), None):
            raise UnreadableWeightsError(f"the checkpoint has tensors of the unknown type {strange}")
        self.tensors = checkpoint.select_tensors(
            every, _rank_names([tensor.name for tensor in every], model_config)
        )

    @property
    def rungs(self) -> list[Rung]:
        """Return the sources in order of preference: the prefetcher if it was requested, then the files if they exist."""
        region: list[Rung] = [("prefetcher", self._region)] if self.asked else []
        if self.asked and self.paths is None:
            region *= 2  # without files, restart a failed prefetcher, which then resumes
        return region + ([("files", self._mapped)] if self.paths else [])

    def _region(self, left: Sequence[Tensor]) -> TensorSource:
        from coldstart.weights.prefetch import PrefetchError, client

        assert self.asked is not None and self.plan is not None
        names = [tensor.name for tensor in left]
        try:
            limits = self.asked.rate_limit
            lease = client.attach(self.asked.source, self.plan, names=names, rate_limit=limits)
            return PrefetchSource(
                lease, frees_loaded=limits is not None and limits.frees_loaded and _loads_once()
            )
        except PrefetchError as error:
            raise SourceLostError(str(error)) from error

    def _mapped(self, left: Sequence[Tensor]) -> TensorSource:
        assert self.paths is not None
        return FileSource(self.paths, left, ahead=get_tensor_model_parallel_world_size() == 1)


def _files(loader: ColdLoader, model_config: ModelConfig, optional: bool) -> dict[str, Path] | None:
    """Return the checkpoint's safetensors files by name, as vLLM selects and downloads them, or None if there are none."""
    if optional and not Path(model_config.model).is_dir():
        return None
    try:
        _, files, use_safetensors, _ = loader._prepare_weights(
            model_config.model,
            None,
            model_config.revision,
            fall_back_to_pt=True,
            allow_patterns_overrides=None,
        )
    except RuntimeError:
        if optional:
            return None
        raise
    if not use_safetensors:
        raise UnreadableWeightsError("the checkpoint is not in safetensors format")
    return {Path(file).name: Path(file) for file in files}


def _rank_names(names: list[str], model_config: ModelConfig) -> list[str]:
    group = get_pp_group()
    if get_current_vllm_config().speculative_config is not None:
        return names  # a draft model may need the target's embeddings on any rank
    partition = os.environ.get(VLLM_PP_LAYER_PARTITION)
    return stage.select_tensor_names(
        names, model_config.hf_config.to_dict(), [group.rank_in_group], group.world_size, partition
    )


def _loads_once() -> bool:
    """Return whether no other process of this server, and no draft model, loads tensors of the same checkpoint."""
    config = get_current_vllm_config()
    return config.speculative_config is None and config.parallel_config.world_size_across_dp == 1


def _shaped(tensor: Tensor, view: memoryview) -> torch.Tensor:
    if tensor.size == 0:
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    return torch.frombuffer(view, dtype=DTYPES[tensor.dtype]).view(tensor.shape)
