"""Entry point that vLLM loads in each of its processes (`vllm.general_plugins`), which registers the load format lazily.

vLLM's API server never imports `vllm.model_executor.model_loader`, and importing it here would slow down every start. The
format is therefore registered right after another module imports that package.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from coldstart.contract.environment import PLAN, TIMELINE_EVENTS
from coldstart.vllm import compat, counting, late

LOAD_FORMAT = "coldstart"
_TABLE = "vllm.model_executor.model_loader"


def register() -> None:
    """Register the load format now if vLLM's loader table is already imported, or else right after its import."""
    late.run_when_imported(_TABLE, lambda _: _add())
    if PLAN.read() or TIMELINE_EVENTS.read():  # only in processes that coldstart starts or measures
        counting.report_phases()


@functools.cache
def _add() -> None:
    if reason := compat.find_unsupported_reason("weights", _register):
        compat.record_fallback("weights", f"{reason}; vLLM's own loader reads the weights")
        _register_default()


def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from coldstart.vllm.weights.loader import ColdLoader

    # vLLM would log the registration at every start, even if the format is not used.
    logger = logging.getLogger(_TABLE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        register_model_loader(LOAD_FORMAT)(ColdLoader)
    finally:
        logger.setLevel(level)


def _register_default() -> None:
    """Map the load format to vLLM's own loader, because the server's arguments already specify the format."""
    from vllm.config.utils import replace
    from vllm.model_executor import model_loader

    def choose(load_config: Any) -> Any:
        return model_loader.get_model_loader(replace(load_config, load_format="auto"))

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = choose
