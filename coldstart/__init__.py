"""coldstart: do the cold-start work of an LLM server once, offline, and start vLLM from it.

The names of `coldstart.api` are importable from here, each loaded on first use. Exceptions are `materialize` and `validate`: as
attributes of this package they are the subpackages of that name. Call `coldstart.api.materialize` and `coldstart.api.validate`.
"""

# Not imported from `typing`, whose import takes longer than a short-lived helper process needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from coldstart.api import (
        AuthRequiredError,
        Bundle,
        ColdstartError,
        CommandFailedError,
        Fallback,
        NoBundleError,
        Server,
        Store,
        UsageError,
        ValidationReport,
        find_bundle,
        serve,
    )

__version__ = "0.1.0"

__all__ = [
    "AuthRequiredError",
    "Bundle",
    "ColdstartError",
    "CommandFailedError",
    "Fallback",
    "NoBundleError",
    "Server",
    "Store",
    "UsageError",
    "ValidationReport",
    "find_bundle",
    "serve",
]


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("coldstart.api"), name)
