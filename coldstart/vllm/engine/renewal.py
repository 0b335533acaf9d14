"""Apply a start's own environment in a process whose libraries read another environment when they were imported."""

from __future__ import annotations

import logging
import sys
from typing import Any

from coldstart.contract.environment import HF_HUB_OFFLINE, TORCH_LOGS, TRANSFORMERS_OFFLINE

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


def renew() -> None:
    """Set the offline switch and torch's loggers as the environment of this process has them."""
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        offline = HF_HUB_OFFLINE.read() or TRANSFORMERS_OFFLINE.read()
        constants.HF_HUB_OFFLINE = offline.upper() in _TRUE  # type: ignore[attr-defined]  # module by name
    configure = getattr(sys.modules.get("torch._logging._internal"), "_init_logs", None)
    if TORCH_LOGS.read() and configure is not None:
        configure()


def set_log_level(config: Any) -> None:
    """Configure vLLM's loggers if their level is not the one of vLLM's `LoggingConfig`."""
    if logging.getLevelName(logging.getLogger("vllm").level) != config.log_level:
        from vllm.logger import configure_logging

        configure_logging(config)
