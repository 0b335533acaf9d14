"""Compiled forward functions: saved once, loaded at every start, never compiled again.

vLLM keeps a module's ahead-of-time compiled forward in `aot_compiled_fn` and calls it when it is set. That attribute is the
vLLM integration point: offline each compiled module's function is serialised with torch's own bundled form; online it is
deserialised and set before the first forward, so that no cache key and no path takes part.

In vLLM 0.31 and 0.32 the reload of the same artifact fails on the inductor backend (it asks the deserialised function for
`finalize_loading`, which torch's bundled form does not have) and vLLM compiles again; this module needs no such method.
"""

from __future__ import annotations

import importlib
import inspect
import json
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INDEX = "modules.json"
INDUCTOR_DIR = "inductor"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class CompiledMismatchError(RuntimeError):
    """The artifact does not fit this model or these sources; the ordinary compilation must run."""


class NotSavedError(RuntimeError):
    """A compiled forward that cannot be written down: vLLM itself goes on without it, and compiles at every start."""


def compiled_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The submodules of `model` that vLLM compiles, by qualified name ('' is the model itself)."""
    for name, module in model.named_modules():
        if getattr(module, "do_not_compile", True) is False:
            yield name, module


def save(model: Any, directory: Path) -> list[str]:
    """Serialise every compiled forward of `model` into `directory`; returns the modules' names.

    Raises NotSavedError when a module that vLLM compiles holds no ahead-of-time function, or one that torch cannot serialise.
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
        except Exception as error:  # what torch cannot pickle it says with whatever pickle, or dynamo, raises
            reason = _ADDRESS.sub("", (str(error).strip().splitlines() or [""])[0])
            raise NotSavedError(
                f"the compiled forward of {kind} cannot be serialised: {type(error).__name__}: {reason}"
            ) from error
        names.append(name)
    (directory / INDEX).write_text(json.dumps(names))
    return names


@contextmanager
def functions_by_content() -> Iterator[None]:
    """Within it torch serialises a function that a decorator hides by its code and closure, as it does a nested one.

    Otherwise it does so by name, and does not find the same object there: so for the forwards of transformers' models, which
    vLLM's Transformers backend compiles.
    """
    try:
        from torch._dynamo.aot_compile import AOTCompilePickler
    except ImportError:  # a torch that does it another way
        yield
        return
    original = AOTCompilePickler.reducer_override

    def reducer_override(self: Any, obj: Any) -> Any:
        reduced = original(self, obj)
        if reduced is not NotImplemented or not inspect.isfunction(obj) or _is_found(obj):
            return reduced
        # Its own globals: functools.wraps gives it the module of what it wraps.
        place = obj.__globals__["__name__"]
        parts = (obj.__code__, place, obj.__qualname__, obj.__defaults__, obj.__closure__)
        return type(self)._unpickle_nested_function, parts

    AOTCompilePickler.reducer_override = reducer_override
    try:
        yield
    finally:
        AOTCompilePickler.reducer_override = original


def _is_found(function: Any) -> bool:
    """Whether pickle finds it again by its module and name."""
    try:
        held = operator.attrgetter(function.__qualname__)(sys.modules[function.__module__])
    except (AttributeError, KeyError):
        return False
    return held is function


def kernels(directory: Path) -> set[Path]:
    """The kernels in an artifact directory (not inductor's probes of the processor, which are built anew anywhere)."""
    return set((directory / INDUCTOR_DIR).rglob("*.main.so"))


def restore(model: Any, directory: Path) -> int:
    """Set the compiled forward of every module in `directory`'s index; returns how many.

    All or nothing: raises CompiledMismatchError, with nothing set, when the modules or their sources differ.
    """
    modules = dict(compiled_modules(model))
    names: list[str] = json.loads((directory / INDEX).read_text())
    if names != list(modules):
        raise CompiledMismatchError(f"compiled modules differ: wanted {list(modules)}, found {names}")
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
    # As vLLM does: it specialises on nothing but the declared dynamic dimensions and drops every guard.
    if not module.compilation_config.dynamic_shapes_config.evaluate_guards:
        function.disable_guard_check()
    return function


def _check_sources(info: Any) -> None:
    """Refuse an artifact traced from other sources than the ones installed (compared by content, never by path)."""
    contents = {source.module: source.content for source in info.inlined_sources}
    for name, content in contents.items():
        if inspect.getsource(importlib.import_module(name)) != content:
            raise CompiledMismatchError(f"{name} has changed since the artifact was made")
