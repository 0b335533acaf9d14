"""Find kernels with exported host stubs, by dlsym and cudaGetFuncBySymbol."""

from __future__ import annotations

import ctypes
from functools import cache

from coldstart.graphs.cuda.calls import bindings, call

RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


@cache
def _runtime() -> ctypes.CDLL | None:
    for name in RUNTIMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def function_by_symbol(kernel: str, library: str | None) -> int | None:
    """Return a CUfunction, or None if the runtime or the symbol is unavailable.

    nvcc exports a kernel's host entry under the kernel's mangled name.
    """
    runtime = _runtime()
    if runtime is None:
        return None
    try:
        holder = ctypes.CDLL(library)
        stub = ctypes.cast(getattr(holder, kernel), ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    function = ctypes.c_void_p()
    if runtime.cudaGetFuncBySymbol(ctypes.byref(function), stub) != 0 or not function.value:
        return None
    call(bindings().cuFuncGetName, bindings().CUfunction(function.value))
    return int(function.value)
