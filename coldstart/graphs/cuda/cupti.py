"""See every module that the driver loads, through CUPTI's resource callbacks: no preload, offline only.

A callback of the domain RESOURCE with id MODULE_LOADED carries {u32 module, size_t bytes, pointer} of the
binary.  Subscribe before the first kernel is launched.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import DriverError

DOMAIN_RESOURCE, MODULE_LOADED = 3, 6
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _Resource(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class _Module(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("size", ctypes.c_size_t), ("image", ctypes.c_void_p))


def candidates() -> Iterator[str]:
    """Names and paths under which libcupti may be found."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(str(path) for path in Path(root).glob("*/lib/libcupti.so*"))
    yield from ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


def library() -> ctypes.CDLL:
    """libcupti. Raises DriverError."""
    for name in candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("dlopen libcupti", "not found: coldstart install gpu")


class ModuleWatch:
    """Feeds a ModuleLog from now until stop(). Raises DriverError where CUPTI refuses a subscriber."""

    def __init__(self, log: ModuleLog) -> None:
        self._log, self._cupti = log, library()
        self._subscriber = ctypes.c_void_p()
        self._callback = _CALLBACK(self._loaded)  # must outlive the subscription
        self._call("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        self._call("cuptiEnableCallback", 1, self._subscriber, DOMAIN_RESOURCE, MODULE_LOADED)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cupti, name)(*arguments)
        if result:
            raise DriverError(name, result)

    def _loaded(self, _: object, domain: int, number: int, data: int) -> None:
        if (domain, number) != (DOMAIN_RESOURCE, MODULE_LOADED):
            return
        resource = ctypes.cast(data, ctypes.POINTER(_Resource)).contents
        module = ctypes.cast(resource.descriptor, ctypes.POINTER(_Module)).contents
        if module.image and module.size:
            self._log.see(ctypes.string_at(module.image, module.size))

    def stop(self) -> None:
        """End the subscription."""
        self._call("cuptiUnsubscribe", self._subscriber)
