"""Server process: vLLM's own API server, with an engine that is forked from this process.

torch and vllm are imported once. vLLM's functions do all the work. It differs from `vllm serve` in four ways:

- The engine process is forked instead of spawned, so it inherits every import.
- The worker lives inside the engine process.
- Garbage is not collected before the server listens.
- The server reports readiness only after it has generated one token.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from psutil import NoSuchProcess

from coldstart.contract import fallback
from coldstart.contract.environment import HF_HUB_OFFLINE, TORCH_LOGS, TRANSFORMERS_OFFLINE
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.system import start_progress, timeline
from coldstart.system.proc.lifeline import die_with_parent, die_with_supervisor
from coldstart.system.proc.scratch import use_scratch_directory
from coldstart.vllm import compat, sleep, stock
from coldstart.vllm.engine import collection, readiness, stepdowns
from coldstart.vllm.engine.application import EarlyApplication
from coldstart.vllm.engine.readiness import Readiness, answer, refuse, take_pipe
from coldstart.vllm.graphs.deferred import capture_rest
from coldstart.vllm.scheduling import settle as scheduler

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
SPAWNED = "vLLM started the engine as a new process, which imported everything again; its log has the reason"
MODEL_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


def import_runtime() -> None:
    """Import everything that both the API server and the engine need, in one process, once.

    Raises:
        ImportError, AttributeError: vLLM lacks a name that the server uses.
    """
    with timeline.measure("import torch", track="server"):
        import torch  # noqa: F401
    with timeline.measure("import vllm", track="server"):
        import uvloop  # noqa: F401
        import vllm.v1.engine.core  # noqa: F401
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: F401
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve  # noqa: F401
        from vllm.entrypoints.launchers.app import build_app  # noqa: F401
        from vllm.entrypoints.launchers.launcher import setup_server  # noqa: F401
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: F401
        from vllm.utils.system_utils import decorate_logs  # noqa: F401
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401

        cli_args = import_cli_args()
        _ = cli_args.make_arg_parser, cli_args.validate_parsed_serve_args


def import_cli_args() -> Any:
    """Return vLLM's module of a server's arguments, which vLLM 0.33 moved. Raises ImportError."""
    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:
        from vllm.entrypoints.common import cli_args
    return cli_args


def import_engine() -> None:
    """Import the modules that the engine process of any model needs beyond `import_runtime`.

    The CPU's worker is imported only on the CPU, because its import replaces torch.cuda's streams and events.
    """
    from vllm.platforms import current_platform

    with timeline.measure("import engine", track="server"):
        import vllm.v1.core.sched.scheduler
        import vllm.v1.structured_output  # noqa: F401
        import xgrammar  # noqa: F401

        if current_platform.is_cpu():
            import coldstart.vllm.engine.executor
            import coldstart.vllm.engine.worker  # noqa: F401


def import_gpu_engine(config: Any) -> None:
    """Import what the worker of a CUDA device imports for this configuration, without initializing CUDA.

    Raises:
        ImportError, AttributeError, ValueError: vLLM lacks a module or a name, or does not have the model's class.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    with timeline.measure("import the GPU engine", track="server"):
        import vllm.v1.attention.backends.flash_attn
        import vllm.v1.worker.gpu_worker  # noqa: F401

        import_module(MODEL_RUNNERS[config.use_v2_model_runner])
        ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)


def renew_environment() -> None:
    """Set the offline switch and torch's loggers as this process's environment has them now, not as at their import."""
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        offline = HF_HUB_OFFLINE.read() or TRANSFORMERS_OFFLINE.read()
        is_offline = offline.upper() in ("1", "ON", "YES", "TRUE")
        constants.HF_HUB_OFFLINE = is_offline  # type: ignore[attr-defined]  # module by name
    configure = getattr(sys.modules.get("torch._logging._internal"), "_init_logs", None)
    if TORCH_LOGS.read() and configure is not None:
        configure()


def set_log_level(config: Any) -> None:
    """Configure vLLM's loggers if their level is not the one of vLLM's `LoggingConfig`."""
    if logging.getLevelName(logging.getLogger("vllm").level) != config.log_level:
        from vllm.logger import configure_logging

        configure_logging(config)


def parse_args(vllm_args: Sequence[str]) -> tuple[Namespace, stepdowns.Fallbacks]:
    """Parse vLLM's flags with vLLM's parser, set our executor and worker unless the user chose others; return fallbacks too."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = import_cli_args().make_arg_parser(FlexibleArgumentParser())
    args: Namespace = parser.parse_args(list(vllm_args))
    fallbacks = stepdowns.settle(args)
    import_cli_args().validate_parsed_serve_args(args)
    return args, fallbacks


def configure(args: Namespace) -> Any:
    """Return vLLM's complete configuration for these arguments, as its API server would create it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    given = AsyncEngineArgs.from_cli_args(args)
    # vLLM's own server passes this flag to the engine; vLLM 0.31 does not have it.
    if not getattr(args, "enable_flash_late_interaction", True) and compat.check("late-interaction") is None:
        import_cli_args().propagate_flash_late_interaction(args, given)
    config = given.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if sleep.is_chosen(args):
        config.model_config.sleep_mode_backend = sleep.NAME  # vLLM has no argument for it
    return config


@asynccontextmanager
async def engine_client(args: Namespace, plan: LaunchPlan, app: EarlyApplication) -> AsyncIterator[Any]:
    """Yield vLLM's asynchronous engine with a forked engine process; `app` is built during its start."""
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    with timeline.measure("configure", track="server"):
        # Parsing the arguments has imported our executor, if this server uses it.
        if executor := sys.modules.get("coldstart.vllm.engine.executor"):
            reason = executor.check_built(args, plan)
            if reason and plan.must_adopt:
                # A worker built in a thawed process would die of an illegal instruction.
                raise UnfitError(reason)
        config = configure(args)
        if scheduler.settle(args, config, plan):
            config = configure(args)
    # A spawned engine imports everything again, about 10 s on a GPU. Creating the configuration forces "spawn" on the CPU,
    # for worker processes; our executor has none, and those of a pipeline and of a user keep it.
    forks = args.distributed_executor_backend == stepdowns.EXECUTOR or not current_platform.is_cpu()
    if forks:
        os.environ[START_METHOD] = "fork"
    # The forked engine inherits our loggers; configuring them again costs more than adopting a built worker.
    if config.logging_config.pylogging_config_file is None:
        compat.check("logging", lambda: set_log_level(config.logging_config))
        config.logging_config = replace(config.logging_config, configure_logging=False)
    readiness.watch_log()
    app.begin_after_fork(args, config)
    collection.postpone_in_children()
    # Until its executor requests SIGTERM: a starting engine only records that signal and waits for its server.
    os.register_at_fork(after_in_child=partial(die_with_parent, signal.SIGKILL))
    # Freeze the imported objects: otherwise each gc.collect() of vLLM's loader scans them, half a second each time.
    gc.freeze()
    with timeline.measure("start engine", track="server"):
        client, loggers = scheduler.engine_client(config, plan)
        engine = client.from_vllm_config(
            config,
            stat_loggers=loggers,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=args.enable_log_requests,
            aggregate_engine_logging=args.aggregate_engine_logging,
            disable_log_stats=args.disable_log_stats,
        )
    if forks and os.environ[START_METHOD] != "fork":
        plan.fallbacks.append(Fallback("engine", SPAWNED))
    compat.check("ending", lambda: outlive(engine.engine_core.resources.engine_manager))
    compat.check("end-requests", lambda: fail_requests_at_shutdown(engine))
    try:
        yield engine
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)


def outlive(manager: Any) -> None:
    """Make the shutdown of vLLM's engine process manager tolerate a process that exits by itself just before it is killed.

    The manager checks that the process lives, then asks psutil for its children. That raises, and vLLM's server never stops.
    """
    if manager is None:
        return
    ended = manager.shutdown

    def shutdown(timeout: float | None = None) -> None:
        with suppress(NoSuchProcess):
            ended(timeout=timeout)

    manager.shutdown = shutdown


def fail_requests_at_shutdown(engine: Any) -> None:
    """Make the shutdown of vLLM's engine fail the requests in progress. Call this in the event loop.

    vLLM ends the engine process and then cancels the task that reads its output. A request in progress then waits forever, and
    vLLM's server waits for the request. If the task finds the end of the engine first, it logs a traceback, which is dropped.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    loop, stop = asyncio.get_running_loop(), engine.shutdown

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))

    def shutdown(timeout: float | None = None) -> None:
        logging.getLogger(type(engine).__module__).addFilter(is_news)
        stop(timeout=timeout)
        with suppress(RuntimeError):  # vLLM calls it again when the loop is closed
            loop.call_soon_threadsafe(engine.output_processor.propagate_error, EngineDeadError())

    engine.shutdown = shutdown


class UnfitError(RuntimeError):
    """The prebuilt worker of this process does not fit the start; the message has the difference."""


async def serve(args: Namespace, plan: LaunchPlan) -> int:
    """Serve until a signal (0), the engine's death (1) or a wrong canary (1); otherwise return as vLLM's `run_server` does."""
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    address, sock = setup_server(args, reuse_port=False)
    app = EarlyApplication()
    async with engine_client(args, plan, app) as engine:
        ready = Readiness(plan, engine, worker_reports=stepdowns.reports(args))
        if not await ready.proven():
            sock.close()
            return 1
        with app.provide():
            capturing: list[asyncio.Task[None]] = []

            async def listening() -> None:
                await ready.listening()
                if plan.engine.deferred and not capturing:
                    capturing.append(asyncio.create_task(capture_rest(engine)))

            shutdown = await build_and_serve(engine, address, sock, args, callback_notify=listening)
            for task in capturing:
                task.cancel()
        died = engine.errored
    try:
        await shutdown
    finally:
        sock.close()
    return 1 if died else 0


def run(plan: LaunchPlan, imported: bool = False) -> int:
    """Run a server for `plan` in this process, and return its exit code after it has ended."""
    plan.install()
    start_progress.start_reporting()
    try:
        with use_scratch_directory():
            return _run(plan, imported)
    except Exception as error:
        readiness.report_failure(error)
        raise


def _run(plan: LaunchPlan, imported: bool) -> int:
    gc.disable()
    if reason := compat.check("start", None if imported else import_runtime):
        gc.enable()
        return stock.run(plan, reason)
    args, fallbacks = parse_args(plan.vllm_args)
    plan.fallbacks.extend(fallbacks)
    if args.headless:
        return run_headless(args, plan)
    import uvloop

    try:
        with scheduler.publish_counters(plan):
            return uvloop.run(serve(args, plan))
    except UnfitError as reason:
        refuse(str(reason))
        return 1


def run_headless(args: Namespace, plan: LaunchPlan) -> int:
    """Run the workers of a node without an API with vLLM's own code until they end, and return the exit code.

    The node reports readiness at once and without a token: only the first node can generate one, and it waits for this one.
    Such nodes have no fallback: a vLLM without them gives exit code 1 and the reason.
    """
    if reason := compat.check("headless", lambda: import_module("vllm.entrypoints.cli.serve").run_headless):
        sys.stderr.write(f"coldstart: cannot run a node without an API: {reason}\n")
        return 1
    from vllm.entrypoints.cli import serve as command

    report = {"fast_path": {}, "fallbacks": fallback.encode(plan.fallbacks), "tokens": [], "headless": True}
    answer(take_pipe(), report)
    args.api_server_count = 0  # as vLLM's own command sets it
    gc.enable()
    command.run_headless(args)
    return 0


if __name__ == "__main__":
    die_with_supervisor()
    try:
        code = run(LaunchPlan.parse(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except Exception as error:  # noqa: BLE001 - the last frame of this process: report and exit
        readiness.exit_process(error)
    sys.exit(code)
