"""A forked server applies its own environment to libraries that the template has imported."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from coldstart.vllm.engine import server


@pytest.mark.parametrize(
    ("given", "offline"),
    [
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"TRANSFORMERS_OFFLINE": "yes"}, True),
        ({"HF_HUB_OFFLINE": "0"}, False),
    ],
)
def test_renew_sets_the_offline_switch_of_the_hub(
    given: dict[str, str], offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = SimpleNamespace(HF_HUB_OFFLINE=not offline)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)  # type: ignore[arg-type]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    server.reapply_environment()
    assert constants.HF_HUB_OFFLINE is offline


@pytest.mark.vllm
def test_set_log_level_configures_vllm_when_the_start_has_another_level() -> None:
    from vllm.config import LoggingConfig

    logger = logging.getLogger("vllm")
    before = logging.getLevelName(logger.level)
    try:
        server.configure_loggers(LoggingConfig(log_level="DEBUG", configure_logging=True))
        assert logger.level == logging.DEBUG
    finally:
        server.configure_loggers(LoggingConfig(log_level=before, configure_logging=True))
