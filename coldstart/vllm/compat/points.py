"""One name of vLLM, the features that use it, and how they use it.

`calls` are signatures as we call them: "step(tokens, *, fast)" passes `tokens` by position and `fast` by keyword; a trailing
`*more` stands for further arguments. The name of the point itself is a call of the function, or of the class's constructor.
`overrides` are methods that our subclasses replace. `reads` are attributes, of the class or set on `self`.
`source` is text that the source of the module or function must contain. `moved` is the module's name in a later vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """vLLM integration point: `path` within `module` ("" is the module itself), and the features that need it."""

    module: str
    path: str
    features: tuple[str, ...]
    calls: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    moved: str = ""

    @property
    def name(self) -> str:
        """Return the full name, for example `vllm.config:VllmConfig`."""
        return f"{self.module}:{self.path}" if self.path else self.module

    @property
    def members(self) -> frozenset[str]:
        """Return every attribute and method that is used, without the constructor."""
        called = {call.partition("(")[0] for call in self.calls} - {self.path.rpartition(".")[2]}
        return frozenset({*self.reads, *self.overrides, *called})


def point(
    features: str,
    name: str,
    *calls: str,
    overrides: str = "",
    reads: str = "",
    source: tuple[str, ...] = (),
    moved: str = "",
) -> Point:
    """Return the point `name` below `vllm`, for example "config:VllmConfig"; other texts are lists of words."""
    module, _, path = f"vllm.{name}".replace(".:", ":").partition(":")
    return Point(
        module, path, tuple(features.split()), calls, tuple(overrides.split()), tuple(reads.split()), source,
        f"vllm.{moved}" if moved else "",
    )  # fmt: skip
