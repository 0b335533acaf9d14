"""Find the binary of a function through its module, with CUPTI callbacks; used only offline, without LD_PRELOAD.

A RESOURCE-domain callback receives the binary of each module that the driver loads. If the load happens in a call of
cuModuleLoad*, as it does for Triton and Inductor kernels, the callback at the end of that call receives the module
handle. The binary of the module's functions is then known even if other functions have the same name. Kernels of lazily
loaded libraries are found by name; if several binaries define a name, the set of functions in the module decides.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

from coldstart.graphs.elf import Cubin, read_cubin
from coldstart.graphs.errors import AlteredTableError, DriverError
from coldstart.graphs.tables import sha256

Layout = tuple[tuple[int, int], ...]
DRIVER_API, RESOURCE = 1, 3  # CUpti_CallbackDomain
MODULE_LOADED = 6  # CUpti_CallbackIdResource
# cuModuleLoad and its variants Data, DataEx and FatBinary; the first parameter is CUmodule *
MODULE_LOADS = (18, 19, 20, 21)
ENTER = 0  # CUpti_ApiCallbackSite
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


@dataclass
class ModuleLog:
    """Loaded kernel binaries by digest, in the order in which they were loaded."""

    images: dict[str, bytes] = field(default_factory=dict)
    cubins: dict[str, Cubin] = field(default_factory=dict)
    _by_name: dict[str, list[str]] = field(default_factory=dict)
    _by_module: dict[int, str] = field(default_factory=dict)

    def record(self, image: bytes) -> str | None:
        """Record a binary, and return its digest, or None if it is not a cubin."""
        digest = sha256(image)
        if digest in self.images:
            return digest
        try:
            cubin = read_cubin(image)
        except AlteredTableError:
            return None
        self.images[digest], self.cubins[digest] = image, cubin
        for name in cubin.kernels:
            self._by_name.setdefault(name, []).append(digest)
        return digest

    def link_module(self, module: int, digest: str) -> None:
        """Record the binary of a module, and replace the binary of an unloaded module with the same handle."""
        self._by_module[module] = digest

    def digest(self, module: int, name: str, layout: Layout, siblings: Callable[[], set[str]]) -> str | None:
        """Return the digest of a function's binary, or None if it is unknown or ambiguous.

        `siblings` returns the names of all functions in the same module, and is called only if needed.
        """
        known = self._by_module.get(module)
        if known is not None and name in self.cubins[known].kernels:
            return known
        fits = [d for d in self._by_name.get(name, []) if self.cubins[d].kernels[name] in (layout, ())]
        if len(fits) > 1:
            names = siblings()
            fits = [d for d in fits if set(self.cubins[d].kernels) == names]
        return fits[0] if len(fits) == 1 else None


class _Resource(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class _Module(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("image", ctypes.c_void_p))


class _Call(ctypes.Structure):
    """First fields of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("name", ctypes.c_char_p), ("parameters", ctypes.c_void_p))


def list_cupti_paths() -> Iterator[str]:
    """Yield the file names and paths under which libcupti can be found."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(str(path) for path in Path(root).glob("*/lib/libcupti.so*"))
    yield from ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


def load_cupti() -> ctypes.CDLL:
    """Load libcupti. Raises DriverError with the install command if it is not found."""
    for name in list_cupti_paths():
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise DriverError("cannot find libcupti; run `coldstart install gpu`")


class ModuleWatch:
    """CUPTI subscription that adds loaded modules to a ModuleLog for the rest of the process.

    Create it before the first kernel launch. Raises DriverError if CUPTI rejects the subscription.
    """

    def __init__(self, log: ModuleLog) -> None:
        self._log, self._cupti = log, load_cupti()
        self._loaded = defaultdict[int, list[str]](list)  # by thread, in its call of cuModuleLoad*
        self._subscriber = ctypes.c_void_p()
        self._callback = _CALLBACK(self._notice)  # the callback must outlive the subscription
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        self._call("cuptiEnableCallback", 1, self._subscriber, RESOURCE, MODULE_LOADED)
        for number in MODULE_LOADS:
            self._call("cuptiEnableCallback", 1, self._subscriber, DRIVER_API, number)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cupti, name)(*arguments)
        if result:
            raise DriverError(f"{name} failed: CUPTI error {result}")

    def _notice(self, _: object, domain: int, number: int, data: int) -> None:
        if (domain, number) == (RESOURCE, MODULE_LOADED):
            resource = ctypes.cast(data, ctypes.POINTER(_Resource)).contents
            module = ctypes.cast(resource.descriptor, ctypes.POINTER(_Module)).contents
            image = ctypes.string_at(module.image, module.size) if module.image and module.size else None
            if image and (seen := self._log.record(image)):
                self._loaded[get_ident()].append(seen)
        elif domain == DRIVER_API and number in MODULE_LOADS:
            call = ctypes.cast(data, ctypes.POINTER(_Call)).contents
            seen_here = self._loaded.pop(get_ident(), [])
            if call.site != ENTER and len(seen_here) == 1:
                (target,) = ctypes.cast(call.parameters, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[:1]
                self._log.link_module(int(target[0] or 0), seen_here[0])
