"""Compiled forward functions: save them once and load them at every start instead of compiling.

vLLM stores a module's ahead-of-time compiled forward in `aot_compiled_fn` and calls it if it is set. That attribute is the
integration point. Offline each compiled module's function is serialised with torch's bundled form. Online it is
deserialised and set before the first forward, so no cache key and no path matters.
In vLLM 0.31 and 0.32 vLLM's own reload of the artifact fails on the inductor backend (it calls `finalize_loading`, which the
function deserialised by torch lacks), and vLLM compiles again. This module does not need that method.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import operator
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldstart.contract.environment import TORCHINDUCTOR_CACHE_DIR

DECORATORS = "vllm.compilation.decorators"
"""Module of vLLM that loads ahead-of-time artifacts."""
INDEX = "modules.json"
INDUCTOR_DIR = "inductor"
_KEPT_SUFFIXES = {".so", ".cpp", ".py"}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Only absolute paths: the hashed text can contain C++ source too, where "-I" begins "-INFINITY".
_DIRECTORIES = re.compile(r" -[IL]/\S*")


class CompiledMismatchError(RuntimeError):
    """The artifact does not fit this model or these sources; vLLM must compile."""


class NotSavedError(RuntimeError):
    """A compiled forward cannot be serialised; vLLM works without it and compiles at every start."""


def rank_directory(directory: Path, rank: int, ranks: int) -> Path:
    """Return where an artifact directory has the functions of a pipeline's rank. All ranks share its kernels."""
    return directory / f"rank-{rank}" if ranks > 1 else directory


def compiled_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the submodules of `model` that vLLM compiles, by qualified name ('' is the model itself)."""
    for name, module in model.named_modules():
        if getattr(module, "do_not_compile", True) is False:
            yield name, module


def save(model: Any, directory: Path) -> list[str]:
    """Serialise every compiled forward of `model` into `directory` and return the modules' names.

    Raises:
        NotSavedError: vLLM compiles no module, or one has no ahead-of-time function, or torch cannot serialise it.
    """
    names = []
    for index, (name, module) in enumerate(compiled_modules(model)):
        function = getattr(module, "aot_compiled_fn", None)
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        if function is None:
            raise NotSavedError(f"{kind} has no ahead-of-time compiled forward")
        try:
            with functions_by_content():
                function.save_compiled_function(str(directory / f"{index}.aot"))
        except Exception as error:  # torch reports objects it cannot pickle with many error types
            reason = _ADDRESS.sub("", (str(error).strip().splitlines() or [""])[0])
            raise NotSavedError(
                f"the compiled forward of {kind} cannot be serialised: {type(error).__name__}: {reason}"
            ) from error
        names.append(name)
    if not names:
        raise NotSavedError("vLLM compiles no part of this model with these arguments")
    (directory / INDEX).write_text(json.dumps(names))
    return names


def copy_kernels(directory: Path) -> None:
    """Copy the kernels that Inductor has built in this process into an artifact directory."""
    source = Path(os.environ[TORCHINDUCTOR_CACHE_DIR])
    for file in source.rglob("*"):
        if file.is_file() and file.suffix in _KEPT_SUFFIXES:
            target = directory / INDUCTOR_DIR / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)


@contextmanager
def functions_by_content() -> Iterator[None]:
    """Make torch serialise a function that a decorator hides by its code and closure, as it does a nested function.

    Otherwise torch serialises it by name, and the name refers to another object. This affects the forwards of transformers'
    models, which vLLM's Transformers backend compiles.
    """
    try:
        from torch._dynamo.aot_compile import AOTCompilePickler
    except ImportError:  # this torch has another pickler
        yield
        return
    original = AOTCompilePickler.reducer_override

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = original(self, obj)
        if reduced is not NotImplemented or not inspect.isfunction(obj) or _is_found(obj):
            return reduced
        # Use the function's own globals: functools.wraps copies the module of the wrapped function.
        place = obj.__globals__["__name__"]
        parts = (obj.__code__, place, obj.__qualname__, obj.__defaults__, obj.__closure__)
        return type(self)._unpickle_nested_function, parts

    AOTCompilePickler.reducer_override = reducer_override
    try:
        yield
    finally:
        AOTCompilePickler.reducer_override = original


def _is_found(function: Any) -> bool:
    """Return whether pickle finds the same function by its module and name."""
    try:
        held = operator.attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return held is function


def kernels(directory: Path) -> set[Path]:
    """Return the kernels in an artifact directory, without Inductor's processor probes, which every machine builds."""
    return set((directory / INDUCTOR_DIR).rglob("*.main.so"))


def restore(model: Any, directory: Path) -> int:
    """Set the compiled forward of every module in `directory`'s index, and return their number.

    Raises:
        CompiledMismatchError: The modules or their sources differ; nothing was set.
    """
    modules = dict(compiled_modules(model))
    names: list[str] = json.loads((directory / INDEX).read_text())
    if names != list(modules):
        raise CompiledMismatchError(f"compiled modules differ: expected {list(modules)}, found {names}")
    loaded = [_load(modules[name], directory / f"{i}.aot") for i, name in enumerate(names)]
    for name, function in zip(names, loaded, strict=True):
        modules[name].aot_compiled_fn = function
        modules[name].was_aot_compile_fn_loaded_from_disk = True
    return len(loaded)


def _load(module: Any, path: Path) -> Any:
    import torch
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(module.vllm_config), path.open("rb") as file:
        function = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
    _check_sources(function.source_info())
    # As in vLLM: it specialises only on the declared dynamic dimensions and drops every guard.
    if not module.compilation_config.dynamic_shapes_config.evaluate_guards:
        function.disable_guard_check()
    return function


def _check_sources(info: Any) -> None:
    """Reject an artifact traced from other sources than the installed ones, compared by content and not by path."""
    contents = {source.module: source.content for source in info.inlined_sources}
    for name, content in contents.items():
        if inspect.getsource(importlib.import_module(name)) != content:
            raise CompiledMismatchError(f"{name} has changed since the artifact was created")


def name_kernels() -> None:
    """Make Inductor in this process name kernels independently of the place where Python and torch are installed.

    Inductor names a kernel by a hash of its source and its compile command, and the command contains the include and library
    directories. Without them a bundle's kernels are found by any installation: the bundle's key contains the versions of
    Python, torch and the compiler. A kernel that exists under Inductor's own name keeps that name.
    """
    try:
        from torch._inductor import codecache

        original = codecache.write
        codecache.get_hash, codecache.get_path  # noqa: B018
    except (ImportError, AttributeError):  # this torch names kernels in another way
        return
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def write(content: Any, extension: str, extra: str = "", *args: Any, **kwargs: Any) -> Any:
        if extension.endswith(".cpp"):
            own_key = codecache.get_hash(content.strip(), extra)
            if not Path(codecache.get_path(own_key, extension)[2]).exists():
                extra = _DIRECTORIES.sub("", extra)
        return original(content, extension, extra, *args, **kwargs)

    codecache.write = write


# --- on a GPU ---


class Aot:
    """Artifacts of one bundle in one worker on a GPU; `reasons` explain each compilation despite an artifact.

    vLLM stores <root>/torch_compile_cache/torch_aot_compile/<hash>/rank_<rank>_<dp>/model and, beside the ranks, Inductor's
    cache. The hash includes the model's path, so a bundle's artifact never has the right name. It is copied to the requested
    path just before vLLM looks there. vLLM then compares the traced sources and decides whether to use it. It can load an
    artifact and compile nevertheless: before PyTorch 2.12 an artifact contains no kernels. vLLM's own counter of compilations
    therefore decides what is reported.
    """

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
        """Copy the artifact of `path`'s rank and Inductor's cache there, unless `path` exists. Return whether it does then."""
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
