"""CPU worker that loads its compiled forward function and its KV cache size from the launch plan.

vLLM loads the worker by qualified name (`--worker-cls`). If the plan lacks a part, or the worker cannot use it, vLLM's
own code runs and `fallbacks` contains the reason.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import CompilationMode, KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from coldstart.contract import environment, fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.system import timeline
from coldstart.system.ipc.peers import PeerError
from coldstart.vllm import compat
from coldstart.vllm.engine import collection, compiled, threads
from coldstart.vllm.sleep import NAME as SLEEP_BACKEND
from coldstart.vllm.weights import entry
from coldstart.weights.load import ladder

logger = logging.getLogger("vllm.coldstart")

WARMUP_TOKENS = 8
LAZY_ARENA_BYTES = 1 << 20
# If vLLM renamed one of these, it would not call our override, and no fallback would name the reason.
_ = CPUWorker.init_device, CPUWorker.load_model, CPUWorker.determine_available_memory


class LazyZeros(TorchFunctionMode):
    """Torch mode in which `torch.zeros` maps large CPU buffers as anonymous memory, which the kernel zeroes at first use."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and len(args) == 1
            and isinstance(args[0], int)
            and args[0] >= LAZY_ARENA_BYTES
            and kwargs.get("dtype") is torch.int8
        ):
            return torch.frombuffer(mmap.mmap(-1, args[0]), dtype=torch.int8)
        return func(*args, **kwargs)


class LazyKvRunner(CPUModelRunner):
    """vLLM's CPU model runner with a KV cache whose pages the kernel zeroes at first use."""

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[Any] | None = None,
    ) -> None:
        with ExitStack() as stack:
            if kv_cache_allocation_context is not None:
                stack.enter_context(kv_cache_allocation_context)
            super().initialize_kv_cache(kv_cache_config, is_profiling, LazyZeros())


class ColdWorker(CPUWorker):
    """vLLM's CPU worker, started from the materialized state in a bundle.

    `used_sections` maps each bundle section to whether it was used. `fallbacks` are the reasons for unused sections.
    """

    used_sections: dict[str, bool]
    fallbacks: list[Fallback]

    def init_device(self) -> None:
        if self._is_rank():
            threads.use_serving_threads(self.vllm_config, self.local_rank)
        super().init_device()
        self.plan = LaunchPlan.current()
        self.used_sections, self.fallbacks, self.restored, self.warm = {}, [], False, False
        if type(self.model_runner) is CPUModelRunner:
            if reason := compat.find_unsupported_reason("lazy-kv"):
                self.fall_back("kv", reason)
            else:
                self.model_runner.__class__ = LazyKvRunner

    def load_model(self, **kwargs: Any) -> None:
        entry.register()  # VLLM_PLUGINS may exclude our plug-in
        ladder.before_fetched = self._restore_compiled
        with timeline.measure("load weights", track="engine"):
            self._load(kwargs)
        ladder.before_fetched = None
        self._restore_compiled(self.model_runner.model)

    def _restore_compiled(self, model: Any) -> None:
        """Restore the compiled code of `model`, unless this was done while its weights were fetched."""
        if self.plan.compile_dir is None or "compile" in self.used_sections:
            return
        if reason := compat.find_unsupported_reason("compile"):
            self.fall_back("compile", reason)
            return
        with timeline.measure("restore compiled forward", track="engine"):
            self._restore(model, Path(self.plan.compile_dir))

    def _load(self, kwargs: dict[str, Any]) -> None:
        with ExitStack() as sharing:
            if environment.WEIGHTS_SOCKET.read():
                try:
                    reason = compat.find_unsupported_reason("sharing", lambda: self._share(sharing))
                except (PeerError, OSError) as error:
                    reason = str(error)
                if reason:
                    self._report_unshared(reason)
            super().load_model(**kwargs)

    def take_over(self, config: KVTransferConfig | None) -> None:
        """Prepare this worker, which a template built before the fork, for a server with the KV transfer settings `config`."""
        self.kv_transfer_config = self.vllm_config.kv_transfer_config = config
        if environment.WEIGHTS_SOCKET.read():
            self._report_unshared("the engine template loaded the weights before the fork")

    def _report_unshared(self, reason: str) -> None:
        self.fall_back("sharing", f"this worker has its own copy of the weights: {reason}")

    def _share(self, stack: ExitStack) -> None:
        from coldstart.vllm.weights import sharing

        stack.enter_context(sharing.share_weights(self.model_runner, is_rank=self._is_rank()))

    def _is_rank(self) -> bool:
        """Return whether this worker is a rank of a pipeline, which has its own process."""
        return bool(self.parallel_config.world_size > 1)

    def _restore(self, model: Any, directory: Path) -> None:
        kernels = compiled.list_kernels(directory)
        compiled.use_portable_kernel_names()
        try:
            compiled.restore_forwards(model, self._get_rank_directory(directory))
            self.restored = self.used_sections["compile"] = True
        except Exception as error:  # noqa: BLE001 - a damaged or foreign artifact must not stop a server
            self.fall_back("compile", f"{type(error).__name__}: {error}")
        if built := len(compiled.list_kernels(directory) - kernels):
            self.fall_back(
                "compile", f"{built} kernels were rebuilt: Inductor's compile command differs on this machine"
            )

    def _get_rank_directory(self, directory: Path) -> Path:
        # Pipeline ranks compile different functions, but share the kernels.
        return directory / f"rank-{self.rank}" if self.parallel_config.world_size > 1 else directory

    def save_compiled(self, directory: str) -> str | None:
        """Save the compiled forward functions and kernels of this rank in an artifact directory.

        Return the reason if they could not be saved, else None.
        """
        rank_directory = self._get_rank_directory(Path(directory))
        rank_directory.mkdir(exist_ok=True)
        try:
            compiled.save_forwards(self.model_runner.model, rank_directory)
        except compiled.NotSavedError as error:
            return str(error)
        # Only this process knows where Inductor builds kernels: vLLM gives each pipeline rank its own directory.
        compiled.copy_kernels(Path(directory))
        return None

    def fall_back(self, section: str, reason: str) -> None:
        """Record the reason why a section of the bundle or a prebuilt worker was not used."""
        logger.warning("coldstart: %s not used: %s", section, reason)
        self.used_sections[section] = False
        self.fallbacks.append(Fallback(section, reason))

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the weights with coldstart's sleep backend if it was chosen, else with vLLM's (GPU only)."""
        if self.model_config.sleep_mode_backend == SLEEP_BACKEND:
            self.sleep_mode_backend.suspend(level)
        else:
            super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory that `sleep` has released: all of it, or only the memory with the given `tags`."""
        if self.model_config.sleep_mode_backend == SLEEP_BACKEND:
            self.sleep_mode_backend.resume(tags)
        else:
            super().wake_up(tags)

    def warm_up(self) -> None:
        """Run the restored forward function once with a few tokens, which initializes its lazy state.

        In eager mode, vLLM runs no warm-up on the CPU, and the later ranks of a pipeline would lack the buffer for their input.
        """
        is_eager_rank = self._is_rank() and self.compilation_config.mode == CompilationMode.NONE
        if (self.restored or is_eager_rank) and not self.warm:
            with timeline.measure("warm up", track="engine"):
                self.model_runner._dummy_run(WARMUP_TOKENS)
            self.warm = True

    def determine_available_memory(self) -> int:
        self.warm_up()
        available: int = super().determine_available_memory()
        return available

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self._is_rank():  # vLLM's engine resumes the collections of its own process only
            collection.resume_collections()
        return times

    def _should_warm_up_model(self) -> bool:
        if self.restored or not super()._should_warm_up_model():
            return False
        if self.compilation_config.mode != CompilationMode.NONE:
            compiled.use_portable_kernel_names()
        return True

    def coldstart_report(self) -> dict[str, Any]:
        """Return the restored sections and the fallbacks, for the process that started this server."""
        found = compat.build_worker_report()
        named = [*fallback.encode(self.fallbacks), *found["fallbacks"]]
        return found | {"fast_path": self.used_sections | found["fast_path"], "fallbacks": named}
