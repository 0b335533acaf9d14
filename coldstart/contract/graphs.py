"""Tasks of an engine process for CUDA graphs, the KV cache and compiled code, and the worker's RPC methods for them."""

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
    """Extra work of each engine process of a server; none by default.

    - `record`: output directory of a recording round, to which the process writes its memory layout.
    - `prove`: directory of the last recording round; the process restores its graphs and compares their results.
    - `restore`: directory of verified graphs to restore.
    - `kv_note`: directory to which each worker writes its KV cache profiling results.
    - `kv_plan`: KV cache sizes by rank, used instead of profiling (`plans` of a bundle).
    - `compiled`: directory of vLLM's compiled artifacts.
    - `deferred`: capture most CUDA graphs after the server is ready. With `restore`, capture missing graphs before that.
    """

    record: Path | None = None
    prove: Path | None = None
    restore: Path | None = None
    kv_note: Path | None = None
    kv_plan: list[dict[str, Any]] | None = None
    compiled: Path | None = None
    deferred: bool = False
