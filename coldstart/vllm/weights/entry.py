"""What vLLM loads in each of its processes (`vllm.general_plugins`): the load format, registered where loaders are looked up.

vLLM's table of loaders is part of a package that its API server never imports, so importing it here would cost every start.
The format is registered right after whoever needs that package has imported it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from coldstart.vllm import compat, late

LOAD_FORMAT = "coldstart"
_TABLE = "vllm.model_executor.model_loader"


def register() -> None:
    """Register the load format: now where vLLM's table of loaders is imported, else as soon as it is."""
    late.when_imported(_TABLE, lambda _: _add())


@functools.cache
def _add() -> None:
    if reason := compat.check("weights", _register):
        compat.fall_back("weights", f"{reason} vLLM loads them its own way.")
        _register_default()


def _register() -> None:
    from coldstart.vllm.weights.loader import register_loader

    # vLLM would say so in the log of every start, also of those that never use it.
    logger = logging.getLogger(_TABLE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        register_loader(LOAD_FORMAT)
    finally:
        logger.setLevel(level)


def _register_default() -> None:
    """Give the load format to vLLM's own loader: the server was already told to use it."""
    from vllm.model_executor import model_loader

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = _default_loader


def _default_loader(load_config: Any) -> Any:
    from vllm.config.utils import replace
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(replace(load_config, load_format="auto"))
