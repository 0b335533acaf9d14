"""Which places of which vLLM versions the hook takes hold of, checked by import before any patch."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from coldstart.graphs.errors import Refused


@dataclass(frozen=True)
class Seam:
    """An attribute path, the parameters it must have, in order (None for what is not callable), and the
    attributes of instances that its source must name: those exist on no class.
    """

    module: str
    path: str
    parameters: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """What is wrong with this seam here, or None."""
        where = f"{self.module}.{self.path}"
        try:
            target: Any = importlib.import_module(self.module)
            for name in self.path.split("."):
                target = _member(target, name)
        except (ImportError, AttributeError) as error:
            return f"{where}: {error}"
        if self.names and (lost := [name for name in self.names if name not in inspect.getsource(target)]):
            return f"{where} names no {', '.join(lost)}"
        if self.parameters is None:
            return None
        found = tuple(inspect.signature(target).parameters)
        return None if found[: len(self.parameters)] == self.parameters else f"{where} takes {found}"


def _member(target: Any, name: str) -> Any:
    fields = getattr(target, "__dataclass_fields__", {})
    return fields[name] if name in fields else getattr(target, name)


@dataclass(frozen=True)
class Adapter:
    """Seams of the versions from `low` up to but not including `high`."""

    low: tuple[int, int]
    high: tuple[int, int]
    seams: tuple[Seam, ...]

    def problems(self) -> list[str]:
        """Everything that does not fit the installed vLLM."""
        return [problem for seam in self.seams if (problem := seam.problem())]


_WRAPPER = "vllm.compilation.cuda_graph"
_MANAGER = "vllm.v1.worker.gpu.cudagraph_utils"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_PLAN = "vllm.v1.worker.startup_plan"
_PIECE = "vllm.compilation.piecewise_backend"
_WORKER = "vllm.v1.worker.gpu_worker"
_HELD = ("self.concrete_cudagraph_entries", "self.is_debugging_mode", "self.runtime_mode", "self.graph_pool")
_LISTS = (
    "self._candidates",
    "self._capture_descs",
    "self.graphs",
    "self._max_full_descs_to_capture",
    "self.pool",
)

ADAPTERS = (
    Adapter(
        (0, 32),
        (0, 33),
        (
            Seam(_WRAPPER, "CUDAGraphWrapper.__call__", ("self", "args", "kwargs")),
            Seam(_WRAPPER, "CUDAGraphEntry.batch_descriptor"),
            Seam(_WRAPPER, "CUDAGraphEntry.cudagraph"),
            Seam(_WRAPPER, "CUDAGraphEntry.output"),
            Seam(_WRAPPER, "CUDAGraphEntry.input_addresses"),
            Seam(_WRAPPER, "get_forward_context", ()),
            Seam(_WRAPPER, "CUDAGraphWrapper._all_instances"),
            Seam(_WRAPPER, "CUDAGraphWrapper", None, _HELD),
            Seam(
                _PIECE,
                "PiecewiseBackend",
                None,
                ("self.piecewise_compile_index", "self.total_piecewise_compiles"),
            ),
            Seam("vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher", None, ("self.cudagraph_keys",)),
            Seam(_MANAGER, "CudaGraphManager.capture", ("self", "create_forward_fn", "progress_bar_desc")),
            Seam(_MANAGER, "CudaGraphManager", None, _LISTS),
            Seam(_MANAGER, "CudaGraphManager.dispatch", None, ("self._candidates",)),
            Seam(_MANAGER, "ModelCudaGraphManager.capture", None, ("self.hidden_states is None",)),
            Seam(_MANAGER, "CudaGraphManager.run_fullgraph", ("self", "desc")),
            Seam(
                _MANAGER, "ModelCudaGraphManager.capture", ("self", "model", "model_state", "input_buffers")
            ),
            Seam(_MANAGER, "BatchExecutionDescriptor.num_tokens"),
            Seam(_MANAGER, "BatchExecutionDescriptor.cg_mode"),
            Seam(_RUNNER, "GPUModelRunner._warmup_and_capture", ("self", "desc", "cudagraph_runtime_mode")),
            Seam(_RUNNER, "GPUModelRunner.capture_model", ("self",)),
            Seam(_RUNNER, "GPUModelRunner.load_model", ("self",)),
            Seam(_RUNNER, "GPUModelRunner", None, ("self.cudagraph_dispatcher",)),
            Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.capture_model", ("self", "profile_only")),
            Seam("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.load_model", ("self",)),
            Seam(_WORKER, "Worker"),
            Seam(_WORKER, "maybe_apply_startup_plan", ("worker",)),
            Seam(_PLAN, "_plan_path", ("fingerprint",)),
            Seam(_PLAN, "compute_plan_fingerprint", ("vllm_config", "rank", "world_size")),
            Seam(_PLAN, "maybe_apply_startup_plan", ("worker",)),
            Seam(_PLAN, "maybe_save_startup_plan", ("worker", "kv_cache_memory_bytes")),
        ),
    ),
)


def adapter(version: str) -> Adapter:
    """The adapter of a vLLM version. Raises Refused: graphs are captured normally there."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    for one in ADAPTERS:
        if len(numbers) == 2 and one.low <= numbers < one.high:
            return one
    raise Refused(f"no adapter for vLLM {version}")
