"""One name of vLLM, the features that need it, and the shape that is expected of it.

Shapes are Python signatures. `call` and `calls` say how we call: every name given must be taken, in that order, and nothing
else may be required. `overrides` are methods that vLLM calls and we replace: the parameters must be these and no others;
`*args` or `**kwargs` stand for whatever there is. `reads` are attributes, of the class or set on `self`. `says` is text
that the source must hold, for what is no attribute of a class.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One name: `path` within `module` ("" is the module itself) and what `features` need of it."""

    module: str
    path: str
    features: tuple[str, ...]
    call: str = ""
    calls: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    says: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As in `vllm.config:VllmConfig`."""
        return f"{self.module}:{self.path}" if self.path else self.module

    @property
    def members(self) -> frozenset[str]:
        """Every attribute and method that is used of it."""
        shapes = (*self.calls, *self.overrides)
        return frozenset({*self.reads, *(shape.partition("(")[0] for shape in shapes)})


def seam(
    features: str,
    name: str,
    call: str = "",
    *,
    calls: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
    reads: str = "",
    says: tuple[str, ...] = (),
) -> Seam:
    """`name` is below `vllm`, as in "config:VllmConfig"; `features` and `reads` are words."""
    module, _, path = f"vllm.{name}".replace(".:", ":").partition(":")
    return Seam(module, path, tuple(features.split()), call, calls, overrides, tuple(reads.split()), says)
