"""What an engine process is asked to do with CUDA graphs, its KV cache and compiled code, and the methods by which its workers
say what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.contract import environment

CANARY = environment.GRAPHS_CANARY
COMPILE_REPORT = "coldstart_compile_report"
"""The method says how many artefacts vLLM loaded, and why others were compiled again."""
KV_REPORT = "coldstart_kv_report"
"""The method that a worker has where a KV plan was asked for: why it was not applied, or None."""
GRAPHS_REPORT = "coldstart_graphs_report"
"""The method that a worker has while graphs are restored: graph (or `*`) to the reason why it was captured."""


@dataclass(frozen=True)
class EngineTask:
    """What each engine process of a server does beside serving; by default nothing.

    `record` is the directory of an offline round, where this process leaves its layout, with `by_reference` naming binaries
    by library, build id and offset instead of copying them; `prove` that of the last round: restore, and compare; `restore`
    holds proven graphs, which a start restores. `kv_note` is the directory of an offline start in which each worker leaves
    what its profiling found, `kv_plan` the sizes of the KV cache by rank that vLLM's start-up plan is to apply (a bundle's
    `plans`). `compiled` holds vLLM's compiled artefacts, laid where its worker looks.
    """

    record: Path | None = None
    prove: Path | None = None
    restore: Path | None = None
    by_reference: bool = False
    kv_note: Path | None = None
    kv_plan: list[dict[str, Any]] | None = None
    compiled: Path | None = None

    def __post_init__(self) -> None:
        for name in ("record", "prove", "restore", "kv_note", "compiled"):
            if (directory := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(directory))  # it comes from JSON as text
