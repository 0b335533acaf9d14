"""Save compiled forward functions once, and load them at every server start instead of compiling.

vLLM stores the ahead-of-time compiled forward function of a module in `aot_compiled_fn`, and calls it if it is set.
Offline, this module serializes that function with torch. Online, it deserializes the function and sets the attribute
before the first forward pass, so neither cache keys nor paths matter. On the Inductor backend, vLLM 0.31 to 0.33 cannot
reload their own artifact (they call `finalize_loading`, which the deserialized function lacks) and compile again. This
module does not need that method.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import operator
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.contract.environment import TORCHINDUCTOR_CACHE_DIR
from coldstart.contract.fallback import Fallback
from coldstart.vllm import compat, late

log = logging.getLogger("vllm.coldstart")
DECORATORS_MODULE = "vllm.compilation.decorators"
"""vLLM module that loads ahead-of-time artifacts."""
INDEX = "modules.json"
INDUCTOR_DIR = "inductor"
_KEPT_SUFFIXES = {".so", ".cpp", ".py"}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Match only absolute paths: the hashed text can also contain C++ source, in which "-INFINITY" starts with "-I".
_DIRECTORIES = re.compile(r" -[IL]/\S*")


class CompiledMismatchError(RuntimeError):
    """Error for an artifact that does not match this model or the installed sources, so vLLM must compile."""


class NotSavedError(RuntimeError):
    """Error for a compiled forward function that torch cannot serialize, so vLLM compiles at every start."""


def iterate_compiled_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each submodule that vLLM compiles; the name of `model` itself is empty."""
    for name, module in model.named_modules():
        if getattr(module, "do_not_compile", True) is False:
            yield name, module


def save_forwards(model: Any, directory: Path) -> list[str]:
    """Serialize the compiled forward function of each module in `model` into `directory`, and return the module names.

    Raises:
        NotSavedError: vLLM compiles no module, a module has no ahead-of-time function, or torch cannot serialize it.
    """
    names = []
    for index, (name, module) in enumerate(iterate_compiled_modules(model)):
        function = getattr(module, "aot_compiled_fn", None)
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        if function is None:
            raise NotSavedError(f"{kind} has no ahead-of-time compiled forward function")
        try:
            with pickle_functions_by_code():
                function.save_compiled_function(str(directory / f"{index}.aot"))
        except Exception as error:  # torch reports objects it cannot pickle with many error types
            reason = _ADDRESS.sub("", (str(error).strip().splitlines() or [""])[0])
            raise NotSavedError(
                f"the compiled forward function of {kind} cannot be serialized: {type(error).__name__}: {reason}"
            ) from error
        names.append(name)
    if not names:
        raise NotSavedError("vLLM compiles no part of this model with these arguments")
    (directory / INDEX).write_text(json.dumps(names))
    return names


def copy_kernels(directory: Path) -> None:
    """Copy the kernels that Inductor has built in this process to an artifact directory."""
    source = Path(os.environ[TORCHINDUCTOR_CACHE_DIR])
    for file in source.rglob("*"):
        if file.is_file() and file.suffix in _KEPT_SUFFIXES:
            target = directory / INDUCTOR_DIR / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)


@contextmanager
def pickle_functions_by_code() -> Iterator[None]:
    """Make torch serialize decorated functions by their code and closure, as it serializes nested functions.

    Otherwise, torch serializes the function by name, and the name refers to the decorator's result. This affects
    transformers models, which vLLM's Transformers backend compiles.
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
        module = obj.__globals__["__name__"]
        parts = (obj.__code__, module, obj.__qualname__, obj.__defaults__, obj.__closure__)
        return type(self)._unpickle_nested_function, parts

    with late.replace_attribute(AOTCompilePickler, "reducer_override", reducer_override):
        yield


def _is_found(function: Any) -> bool:
    """Return whether pickle can find `function` by its module and name."""
    try:
        held = operator.attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return held is function


def list_kernels(directory: Path) -> set[Path]:
    """Return the kernels in an artifact directory, without Inductor's CPU probes, which every machine builds itself."""
    return set((directory / INDUCTOR_DIR).rglob("*.main.so"))


def restore_forwards(model: Any, directory: Path) -> None:
    """Set the compiled forward function of each module from an artifact directory.

    Raises:
        CompiledMismatchError: The modules or their sources differ from those of the artifact; no function was set.
    """
    modules = dict(iterate_compiled_modules(model))
    names: list[str] = json.loads((directory / INDEX).read_text())
    if names != list(modules):
        raise CompiledMismatchError(
            f"the artifact has the modules {names}, but the model has {list(modules)}"
        )
    loaded = [_load(modules[name], directory / f"{i}.aot") for i, name in enumerate(names)]
    for name, function in zip(names, loaded, strict=True):
        modules[name].aot_compiled_fn = function
        modules[name].was_aot_compile_fn_loaded_from_disk = True


def _load(module: Any, path: Path) -> Any:
    import torch
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(module.vllm_config), path.open("rb") as file:
        function = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
    _check_sources(function.source_info())
    # As in vLLM, which specializes only on the declared dynamic dimensions and drops all guards.
    if not module.compilation_config.dynamic_shapes_config.evaluate_guards:
        function.disable_guard_check()
    return function


def _check_sources(info: Any) -> None:
    """Raise CompiledMismatchError if an installed source file differs from the one that the artifact was traced from."""
    contents = {source.module: source.content for source in info.inlined_sources}
    for name, content in contents.items():
        if inspect.getsource(importlib.import_module(name)) != content:
            raise CompiledMismatchError(f"the source of {name} has changed since the artifact was created")


def use_portable_kernel_names() -> None:
    """Make Inductor's kernel names in this process independent of the installation directories of Python and torch.

    Inductor names a kernel by a hash of its source and compile command, which contains the include and library
    directories. If the hash omits these directories, every installation finds the kernels in a bundle, whose key contains
    the versions of Python, torch and the compiler. A kernel that already exists under Inductor's own name keeps that
    name.
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


class AotArtifacts:
    """vLLM's own ahead-of-time artifacts in one bundle, used by one GPU worker.

    vLLM reads <root>/torch_compile_cache/torch_aot_compile/<hash>/rank_<rank>_<dp>/model and, in the parent directory,
    Inductor's cache. The hash includes the model path, so the path in the bundle never matches. The artifact is therefore
    copied to the path that vLLM requests, just before vLLM reads it. vLLM compares the traced sources and decides whether
    to use it. vLLM can load an artifact and still compile, because artifacts of PyTorch before 2.12 contain no kernels.
    The report therefore uses vLLM's own counter of compilations.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._misses, self.loaded_count = directory, list[str](), 0

    @property
    def compile_reasons(self) -> list[str]:
        """Return the reasons why vLLM compiled in this process although the bundle has artifacts."""
        if self._misses:
            return self._misses
        from vllm.compilation.counter import compilation_counter

        count = compilation_counter.num_inductor_compiles
        if self.loaded_count and count:
            return [
                f"vLLM loaded the artifact and compiled {count} graphs again: it contains no kernels for them"
            ]
        # The section may contain only caches of other compilers. vLLM 0.33 makes no artifact of a Transformers model.
        if not self.loaded_count and (self._directory.is_dir() or count):
            return ["vLLM requested no ahead-of-time artifact"]
        return []

    def add_reason(self, reason: str) -> None:
        """Add a reason why vLLM compiles."""
        self._misses.append(reason)

    def wrap_loader(self, module: Any) -> None:
        """Patch vLLM's artifact loader in `module` so that it first copies the bundle's artifact to the path that it reads."""
        original = module._try_load_aot_compiled_fn

        @functools.wraps(original)
        def load(model: Any, aot_compilation_path: str) -> Any:
            laid = self.copy_from_bundle(Path(aot_compilation_path))
            compiled = original(model, aot_compilation_path)
            self.loaded_count += compiled is not None
            if laid and compiled is None:
                rank = Path(aot_compilation_path).parent.name
                self.add_reason(f"{rank}: vLLM rejected the artifact and compiled again")
            return compiled

        module._try_load_aot_compiled_fn = load

    def copy_from_bundle(self, path: Path) -> bool:
        """Copy all artifacts and Inductor's cache to where `path` is unless it exists. Return whether `path` then exists."""
        root = path.parent.parent
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            with files.hold_lock(root.with_name(f".{root.name}.lock")):  # the other ranks copy the same files
                if path.exists():
                    return True
                if (held := self._find_artifact(path.parent.name, path.name)) is None:
                    return False
                shutil.copytree(held.parent.parent, root, dirs_exist_ok=True)
        except OSError as error:
            self.add_reason(f"{path.parent.name}: cannot copy the artifact: {error}")
        return path.exists()

    def _find_artifact(self, rank: str, name: str) -> Path | None:
        """Return the rank's artifact, or None if there is not exactly one: a model can have several compiled parts."""
        artifacts = sorted(self._directory.glob(f"*/{rank}/{name}"))
        if len(artifacts) != 1:
            self.add_reason(f"{rank}: the bundle has {len(artifacts)} artifacts")
        return artifacts[0] if len(artifacts) == 1 else None


def install_artifacts(directory: Path) -> None:
    """Let vLLM load the artifacts in `directory` in this process. The worker's report has the reasons if it compiles."""
    artifacts = AotArtifacts(directory)
    compat.fallback_sources.append(lambda: [Fallback("compile", why) for why in artifacts.compile_reasons])
    if reason := compat.find_unsupported_reason("aot"):
        log.warning("vLLM compiles: %s", reason)
        artifacts.add_reason(reason)
    else:
        late.run_when_imported(DECORATORS_MODULE, artifacts.wrap_loader, artifacts.add_reason)
