"""vLLM's ahead-of-time artefacts laid where its worker looks, under the hash that this worker computes.

vLLM keeps <root>/torch_compile_cache/torch_aot_compile/<hash>/rank_<rank>_<dp>/model and, beside the ranks, Inductor's
cache.  The hash has the model's path in it, so a bundle's artefact is never found by name; it is copied to the name that
is asked for just before vLLM looks.  What vLLM then makes of it is its own decision: it compares the traced sources.
Nothing is lost by a miss but time, and each is named.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from coldstart.contract.graphs import COMPILE_REPORT

MODULE, WORKER = "vllm.compilation.decorators", "vllm.v1.worker.gpu_worker"


class Aot:
    """The artefacts of one bundle in one worker; `reasons` say why something was compiled although it is here."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.reasons, self.loaded = directory, list[str](), 0

    def install(self, module: Any) -> None:
        """Wrap vLLM's look-up."""
        original = module._try_load_aot_compiled_fn

        @functools.wraps(original)
        def load(model: Any, aot_compilation_path: str) -> Any:
            laid = self.lay(Path(aot_compilation_path))
            compiled = original(model, aot_compilation_path)
            self._account(laid, compiled is not None, Path(aot_compilation_path))
            return compiled

        module._try_load_aot_compiled_fn = load

    def report_in(self, module: Any) -> None:
        """Give vLLM's worker, where it has one, the method by which the server asks."""
        if (worker := getattr(module, "Worker", None)) is not None:
            setattr(worker, COMPILE_REPORT, lambda worker: {"loaded": self.loaded, "reasons": self.reasons})

    def lay(self, path: Path) -> bool:
        """Copy the artefact of `path`'s rank and Inductor's cache there, unless something is there already."""
        if path.exists():
            return True
        held = self._held(path.parent.name, path.name)
        if held is None:
            return False
        try:
            shutil.copytree(held.parent.parent, path.parent.parent, dirs_exist_ok=True)
        except OSError as error:
            self.reasons.append(f"{path.parent.name}: the artefact cannot be laid: {error}")
        return path.exists()

    def _held(self, rank: str, name: str) -> Path | None:
        """The only artefact of that rank: one bundle is of one configuration, but a model may have several parts."""
        artefacts = sorted(self._directory.glob(f"*/{rank}/{name}"))
        if len(artefacts) != 1:
            self.reasons.append(f"{rank}: the bundle has {len(artefacts)} artefacts")
        return artefacts[0] if len(artefacts) == 1 else None

    def _account(self, laid: bool, loaded: bool, path: Path) -> None:
        self.loaded += loaded
        if laid and not loaded:
            self.reasons.append(f"{path.parent.name}: vLLM did not take the artefact and compiled again")
