"""Tasks of an engine process for CUDA graphs, KV cache and compiled code, and the worker methods that a server calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER_REPORT = "coldstart_report"
"""Worker method that returns whether each section was used (`fast_path`), the fallbacks, and the load of its weights."""
CAPTURE_NEXT = "coldstart_capture_next"
"""Worker method while captures are deferred: shows the last graph if all ranks captured it, and captures the next one."""


@dataclass(frozen=True)
class EngineTask:
    """Work of each engine process of a server besides serving; none by default.

    - `record`: directory of an offline round, where this process writes its layout.
    - `prove`: directory of the last offline round, which restores the graphs and compares the results.
    - `restore`: directory of proven graphs, which a start restores.
    - `kv_note`: directory of an offline start to which each worker writes its profiling results.
    - `kv_plan`: KV cache sizes by rank, set instead of profiling (a bundle's `plans`).
    - `compiled`: directory of vLLM's compiled artifacts.
    - `deferred`: capture most CUDA graphs after the server is ready. With `restore`, all that are left are captured before.
    """

    record: Path | None = None
    prove: Path | None = None
    restore: Path | None = None
    kv_note: Path | None = None
    kv_plan: list[dict[str, Any]] | None = None
    compiled: Path | None = None
    deferred: bool = False
