"""Import cuda-bindings at first use, convert error codes to DriverError, and set the primary context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from coldstart.graphs.errors import DriverError

OLDEST = 13  # earlier versions have another signature for calls with edge data


@cache
def bindings() -> Any:
    """Return the module cuda.bindings.driver. Raises DriverError with the install command if it is missing or too old."""
    try:
        driver = import_module("cuda.bindings.driver")
        version = str(import_module("cuda.bindings").__version__)
    except ImportError as error:
        raise DriverError("import cuda.bindings", f"{error}: coldstart install gpu") from error
    if int(version.split(".")[0]) < OLDEST:
        raise DriverError("import cuda.bindings", f"{version} is too old: coldstart install gpu")
    return driver


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the values after the error code: none, one, or a tuple. Raises DriverError."""
    try:
        error, *values = function(*arguments)
    except RuntimeError as missing:  # cuda-bindings found no driver library or no entry point
        raise DriverError(function.__name__, missing) from missing
    if int(error) != 0:
        raise DriverError(function.__name__, error.name)
    return values[0] if len(values) == 1 else tuple(values)


def primary_context(ordinal: int = 0) -> Any:
    """Retain the primary context of a device and make it current in this thread."""
    d = bindings()
    call(d.cuInit, 0)
    context = call(d.cuDevicePrimaryCtxRetain, call(d.cuDeviceGet, ordinal))
    call(d.cuCtxSetCurrent, context)
    return context


def bytes_at(address: int, size: int) -> bytes:
    """Return bytes of host memory."""
    return ctypes.string_at(address, size)


def aligned(size: int, alignment: int) -> tuple[Any, int]:
    """Return zeroed host memory and an aligned address in it; the memory lives as long as the first value."""
    held = ctypes.create_string_buffer(size + alignment)
    return held, -(-ctypes.addressof(held) // alignment) * alignment
