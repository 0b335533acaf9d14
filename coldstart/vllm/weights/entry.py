"""What vLLM loads in each of its processes (`vllm.general_plugins`): the load format, registered where loaders are looked up.

vLLM's table of loaders is part of a package that its API server never imports, so importing it here would cost every start.
The format is registered right after whoever needs that package has imported it.
"""

from __future__ import annotations

import functools
import logging

from coldstart.vllm import late

LOAD_FORMAT = "coldstart"
_TABLE = "vllm.model_executor.model_loader"
log = logging.getLogger("vllm.coldstart.loader")


def register() -> None:
    """Register the load format: now where vLLM's table of loaders is imported, else as soon as it is."""
    late.when_imported(_TABLE, lambda _: _add())


@functools.cache
def _add() -> None:
    from coldstart.vllm import seams

    if reason := seams.check("weights"):
        log.warning("the load format %s is not there: %s", LOAD_FORMAT, reason)
        return
    from coldstart.vllm.weights.loader import register_loader

    # vLLM would say so in the log of every start, also of those that never use it.
    logger = logging.getLogger(_TABLE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        register_loader(LOAD_FORMAT)
    finally:
        logger.setLevel(level)
