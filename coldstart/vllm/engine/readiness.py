"""Report the readiness or the failure of a server to the process that started the server.

A server is ready when it listens and has generated one token. Invariant: a server whose restored state generates wrong
canary tokens never serves a client, because it generates them before it listens. The report is one line of JSON, written
to a pipe, that lists the restored and the unused bundle sections.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NoReturn

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import WORKER_REPORT
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.system import start_progress, timeline
from coldstart.vllm.engine.rejection import StartFailure

SPAWNED = "vLLM started the engine or a rank as a new process, which imported all in {:.1f} s; its log has the reason"
FALLBACK_PROMPT = [1, 2, 3, 4]


class Readiness:
    """Readiness report of one server, sent once, after the server listens and has generated one token.

    `own_paths` are stages that the workers do not report, and in which coldstart's code runs if there is no fallback. If
    `is_forked`, a worker whose process, or whose engine's process, was not forked is a fallback.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        engine: Any,
        has_reporting_workers: bool,
        own_paths: Sequence[str] = (),
        is_forked: bool = False,
    ) -> None:
        self.plan, self.engine, self.has_reporting_workers = plan, engine, has_reporting_workers
        self.own_paths, self.is_forked = own_paths, is_forked
        self.descriptor = take_ready_pipe()
        self.tokens: list[int] = []
        self.began = timeline.now()
        self.is_reported = False

    async def check_canary(self) -> bool:
        """Generate the first token of the canary prompt. If it is wrong, report that and return False.

        Call this before the server listens, so that wrong restored state never serves a client. If CUDA graphs were
        restored, this generates all canary tokens, because the first token comes from a prefill, which uses no graph.
        """
        self.tokens = await self._tokens()
        self.began = timeline.now()
        if self._canary() is not False:
            return True
        await self._acknowledge()
        return False

    async def report_ready(self) -> None:
        """Report readiness once. uvicorn calls this when it accepts connections, and periodically afterwards."""
        if self.is_reported:
            return
        timeline.emit_span("build app", self.began, timeline.now(), track="server")
        await self._acknowledge()
        gc.enable()

    async def _acknowledge(self) -> None:
        self.is_reported = True
        report = await self._report()
        start_progress.stop_reporting()
        send_report(self.descriptor, report)

    def _canary(self) -> bool | None:
        known = self.plan.canary
        if not known or not self.tokens:
            return None
        return bool(self.tokens == known["tokens"][: len(self.tokens)])

    async def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            # If this vLLM does not support our worker, the worker cannot report that itself.
            "fast_path": dict.fromkeys(self.own_paths, True)
            | {one.stage: False for one in self.plan.fallbacks if one.stage in ("worker", *self.own_paths)},
            "fallbacks": fallback.encode(self.plan.fallbacks),
            "tokens": self.tokens,
            "canary": self._canary(),
        }
        task = self.plan.engine
        wanted = {"compile": task.compiled, "kv": task.kv_plan, "graphs": task.restore or task.deferred}
        requested = [section for section, is_wanted in wanted.items() if is_wanted]
        workers = await self._ask_workers(requested)
        import_s = max((worker.get("import_s", 0.0) for worker in workers), default=0.0)
        if self.is_forked and import_s:
            report["fallbacks"] += fallback.encode([Fallback("engine", SPAWNED.format(import_s))])
        for worker in workers:
            for name, taken in worker["fast_path"].items():
                report["fast_path"][name] = taken and report["fast_path"].get(name, True)
            report["fallbacks"] += (one for one in worker["fallbacks"] if one not in report["fallbacks"])
            if worker["load"]:
                report.setdefault("loads", []).append(worker["load"])
        for section in requested:
            report["fast_path"].setdefault(section, True)
        return report

    async def _ask_workers(self, requested: list[str]) -> list[dict[str, Any]]:
        """Return the reports of the workers, or none if no worker has anything to report."""
        if not (self.has_reporting_workers or self.is_forked or requested):
            return []
        try:
            reports: list[dict[str, Any]] = await self.engine.collective_rpc(WORKER_REPORT)
        except Exception as error:  # noqa: BLE001 - without the plug-in vLLM raises various errors
            reason = f"the plug-in did not load: {error}"
            lost = [Fallback(section, reason) for section in requested or ["engine"]]
            return [
                {"fast_path": dict.fromkeys(requested, False), "fallbacks": fallback.encode(lost), "load": {}}
            ]
        return reports

    async def _tokens(self) -> list[int]:
        if "generate" not in await self.engine.get_supported_tasks():
            return []
        known, start = self.plan.canary, timeline.now()
        count = len(known["tokens"]) if known and self.plan.engine.restore else 1
        tokens = await self._generate(known["prompt"] if known else FALLBACK_PROMPT, count)
        timeline.emit_span("first token", start, timeline.now(), track="server")
        return tokens

    async def _generate(self, prompt: list[int], count: int) -> list[int]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        tokens: list[int] = []
        async for output in self.engine.generate(TokensPrompt(prompt_token_ids=prompt), params, "coldstart"):
            tokens = list(output.outputs[0].token_ids)
        return tokens


def take_ready_pipe() -> int:
    """Return the descriptor of the pipe to the process that started the server, or -1, and remove it from the environment."""
    return int(os.environ.pop(READY_FD_ENV, "-1"))


def send_report(descriptor: int, document: dict[str, Any]) -> None:
    """Write the final report to the pipe `descriptor`, and close the pipe. Do nothing if `descriptor` is negative."""
    if descriptor >= 0:
        os.write(descriptor, (json.dumps(document) + "\n").encode())
        os.close(descriptor)


def report_unfit(reason: str) -> None:
    """Report the reason why this process cannot run the launch plan to the process that started it."""
    send_report(take_ready_pipe(), {"unfit": reason})


# --- errors before a server is ready ---


def report_failure(error: BaseException) -> None:
    """Report an error to the process that started the server. Do nothing without a pipe or after readiness was reported.

    vLLM logs an error in the process where it occurs, which may be the engine process. The server continues after this
    report. The receiver uses the last report if the server exits before it is ready.
    """
    descriptor = int(os.environ.get(READY_FD_ENV, "-1"))
    if descriptor >= 0:
        failed = asdict(StartFailure.from_error(error))
        with suppress(OSError):
            os.write(descriptor, (json.dumps({"failed": failed}) + "\n").encode())


@contextmanager
def report_failures() -> Iterator[None]:
    """Report an error that ends this block to the process that started this one."""
    try:
        yield
    except Exception as error:
        report_failure(error)
        raise


class _Reporter(logging.Handler):
    """Logging handler that reports each exception that vLLM logs."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            report_failure(error)


def report_logged_errors() -> None:
    """Report the errors that vLLM logs in this process and in processes that it forks from now on."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Reporter) for handler in logger.handlers):
        logger.addHandler(_Reporter(logging.ERROR))


def exit_with_error(error: BaseException) -> NoReturn:
    """Print the error with its traceback, run the exit functions, and exit with code 1.

    The interpreter is not finalized, because nanobind would then print about 180 lines of leak warnings.
    """
    traceback.print_exception(error)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
