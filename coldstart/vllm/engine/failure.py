"""Report the error that ends a server before it is ready to the process that started it.

vLLM logs such an error in the process where it occurs, which may be the engine's, and the log goes on for many lines. A report
alone ends nothing: the starter uses the last one if the server exits without having reported readiness.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from coldstart.contract.plan import READY_FD_ENV
from coldstart.vllm.engine.rejection import Failure


def report(error: BaseException) -> None:
    """Write the error to the pipe of the starter; do nothing in a process without one, or after readiness was reported."""
    descriptor = int(os.environ.get(READY_FD_ENV, "-1"))
    if descriptor >= 0:
        failed = Failure.describe(error).document()
        with suppress(OSError):
            os.write(descriptor, (json.dumps({"failed": failed}) + "\n").encode())


class _Reporter(logging.Handler):
    """Handler that reports each error that vLLM logs with its exception."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            report(error)


def watch_log() -> None:
    """Report the errors that vLLM's loggers log in this process, and in the processes that it forks from now on."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Reporter) for handler in logger.handlers):
        logger.addHandler(_Reporter(logging.ERROR))


def exit_process(error: BaseException) -> NoReturn:
    """Print the error as Python does, run the exit functions, and end this process with exit code 1.

    The interpreter is not finalized, because nanobind would then print about 180 lines of leak warnings after the error.
    """
    traceback.print_exception(error)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
