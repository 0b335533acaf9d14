"""What keeps a whole engine from recording and restoring graphs, and where it is said."""

from __future__ import annotations

import logging
from typing import Any

from coldstart.graphs.errors import Refused

log = logging.getLogger("vllm.coldstart.graphs")


def refuse_parallel(runner: Any) -> None:
    """Raises Refused for an engine of several ranks."""
    parallel = runner.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise Refused("graphs of several ranks hold collectives")
