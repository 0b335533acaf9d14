"""Copy a bundle's ahead-of-time artifacts to the path that vLLM's worker computes.

vLLM stores <root>/torch_compile_cache/torch_aot_compile/<hash>/rank_<rank>_<dp>/model and, beside the ranks, Inductor's
cache. The hash includes the model's path, so a bundle's artifact never has the right name. It is copied to the requested
path just before vLLM looks there. vLLM then compares the traced sources and decides whether to use it.
A miss costs only time, and each miss is reported.

vLLM can load an artifact and compile nevertheless: before PyTorch 2.12 an artifact contains no kernels. vLLM's own counter of
compilations therefore decides what is reported.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

MODULE = "vllm.compilation.decorators"


class Aot:
    """Artifacts of one bundle in one worker; `reasons` explain each compilation despite an artifact."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._misses, self.loaded = directory, list[str](), 0

    @property
    def reasons(self) -> list[str]:
        """Return why vLLM compiled in this process although the bundle has artifacts."""
        # A section can contain only caches of other compilers: without compilation vLLM requests no artifact.
        if not self.loaded and not self._misses and self._directory.is_dir():
            return ["vLLM requested no ahead-of-time artifact"]
        count = _compilations() if self.loaded and not self._misses else 0
        counted = (
            f"vLLM loaded the artifact and compiled {count} graphs again: it contains no kernels for them"
        )
        return [*self._misses, *([counted] if count else [])]

    def miss(self, reason: str) -> None:
        """Add a reason for which vLLM compiles."""
        self._misses.append(reason)

    def install(self, module: Any) -> None:
        """Wrap vLLM's function that loads artifacts."""
        original = module._try_load_aot_compiled_fn

        @functools.wraps(original)
        def load(model: Any, aot_compilation_path: str) -> Any:
            laid = self.lay(Path(aot_compilation_path))
            compiled = original(model, aot_compilation_path)
            self._account(laid, compiled is not None, Path(aot_compilation_path))
            return compiled

        module._try_load_aot_compiled_fn = load

    def lay(self, path: Path) -> bool:
        """Copy the artifact of `path`'s rank and Inductor's cache there, unless the path exists. Return whether it exists."""
        if path.exists():
            return True
        held = self._held(path.parent.name, path.name)
        if held is None:
            return False
        try:
            shutil.copytree(held.parent.parent, path.parent.parent, dirs_exist_ok=True)
        except OSError as error:
            self.miss(f"{path.parent.name}: cannot copy the artifact: {error}")
        return path.exists()

    def _held(self, rank: str, name: str) -> Path | None:
        """Return the only artifact of that rank, None if there are several: a model may have several compiled parts."""
        artifacts = sorted(self._directory.glob(f"*/{rank}/{name}"))
        if len(artifacts) != 1:
            self.miss(f"{rank}: the bundle has {len(artifacts)} artifacts")
        return artifacts[0] if len(artifacts) == 1 else None

    def _account(self, laid: bool, loaded: bool, path: Path) -> None:
        self.loaded += loaded
        if laid and not loaded:
            self.miss(f"{path.parent.name}: vLLM rejected the artifact and compiled again")


def _compilations() -> int:
    """Return the number of graphs that Inductor compiled in this process; what it took from its cache does not count."""
    from vllm.compilation.counter import compilation_counter

    return int(compilation_counter.num_inductor_compiles)
