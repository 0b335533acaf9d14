"""The error that ends a server reaches the process that started it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from coldstart.contract.plan import READY_FD_ENV
from coldstart.vllm.engine import readiness
from coldstart.vllm.engine.rejection import StartFailure


def test_watch_log_reports_an_error_that_vllm_logs_with_its_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    try:
        readiness.report_logged_errors()
        readiness.report_logged_errors()
        try:
            raise ValueError("no space\nfor the KV cache")
        except ValueError:
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
        logging.getLogger("vllm.v1.engine.core").error("without an exception")
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert [json.loads(line) for line in pipe] == [
                {"failed": StartFailure("ValueError: no space for the KV cache").to_document()}
            ]
    finally:
        logger.handlers[:] = before


def test_exit_with_error_runs_the_exit_functions_and_ends_with_the_traceback() -> None:
    program = (
        "import atexit; from coldstart.vllm.engine import readiness; atexit.register(print, 'left')\n"
        "try: raise ValueError('the cause')\nexcept ValueError as error: readiness.exit_with_error(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "left\n") and done.stderr.endswith("ValueError: the cause\n")
