"""Server process that runs vLLM's API server with an engine forked from the same process.

torch and vllm are imported once, and vLLM's functions do all the work. There are four differences from `vllm serve`:

- The engine process is forked instead of spawned, so it inherits all imported modules.
- The worker runs inside the engine process.
- Garbage is not collected before the server listens.
- The server reports that it is ready only after it has generated one token.
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
from typing import Any, NoReturn

from psutil import NoSuchProcess

from coldstart.contract import fallback
from coldstart.contract.environment import (
    HF_HUB_OFFLINE,
    TORCH_LOGS,
    TRANSFORMERS_OFFLINE,
    VLLM_SERVER_DEV_MODE,
)
from coldstart.contract.plan import LaunchPlan
from coldstart.system import start_progress, timeline
from coldstart.system.proc.lifeline import die_with_parent, die_with_supervisor
from coldstart.system.proc.scratch import use_scratch_directory
from coldstart.vllm import compat, package_scans, sleep, stock
from coldstart.vllm.engine import collection, components, readiness
from coldstart.vllm.engine.application import EarlyApplication
from coldstart.vllm.engine.readiness import Readiness, report_unfit, send_report, take_ready_pipe
from coldstart.vllm.engine.rejection import RejectedArgumentsError
from coldstart.vllm.graphs.deferred import capture_remaining
from coldstart.vllm.scheduling import settle as scheduler

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
MODEL_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


def import_runtime() -> None:
    """Import the modules that both the API server and the engine need.

    Raises:
        ImportError, AttributeError: vLLM lacks a name that the server uses.
    """
    package_scans.reuse_scans()
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
    """Import and return vLLM's module of server arguments, which vLLM 0.33 moved. Raises ImportError."""
    try:
        from vllm.entrypoints.launchers import cli_args
    except ImportError:
        from vllm.entrypoints.common import cli_args
    return cli_args


def import_engine() -> None:
    """Import the modules that every engine process needs in addition to those of `import_runtime`.

    The CPU worker is imported only on the CPU, because its import replaces torch.cuda's streams and events.
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
    """Import the modules that a GPU worker needs for this configuration, without initializing CUDA.

    Raises:
        ImportError, AttributeError, ValueError: vLLM lacks a module, a name or the class of the model.
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


def reapply_environment() -> None:
    """Reapply the variables of Hugging Face's offline mode and torch's loggers, which these libraries read only at import."""
    if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
        offline = HF_HUB_OFFLINE.read() or TRANSFORMERS_OFFLINE.read()
        is_offline = offline.upper() in ("1", "ON", "YES", "TRUE")
        constants.HF_HUB_OFFLINE = is_offline  # type: ignore[attr-defined]  # module by name
    configure = getattr(sys.modules.get("torch._logging._internal"), "_init_logs", None)
    if TORCH_LOGS.read() and configure is not None:
        configure()


def configure_loggers(config: Any) -> None:
    """Configure vLLM's loggers if their level differs from the level in `config`."""
    if logging.getLevelName(logging.getLogger("vllm").level) != config.log_level:
        from vllm.logger import configure_logging

        configure_logging(config)


def parse_args(vllm_args: Sequence[str]) -> tuple[Namespace, components.Fallbacks]:
    """Parse vLLM arguments with vLLM's parser, choose coldstart's components, and return the arguments and the fallbacks.

    Raises RejectedArgumentsError if vLLM's parser rejects the arguments.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def reject(message: str) -> NoReturn:
        raise RejectedArgumentsError(message)

    parser = import_cli_args().make_arg_parser(FlexibleArgumentParser())
    parser.error = reject  # the parser itself would print its usage, and exit without an error
    args: Namespace = parser.parse_args(list(vllm_args))
    fallbacks = components.select_components(args)
    import_cli_args().validate_parsed_serve_args(args)
    return args, fallbacks


def create_config(args: Namespace) -> Any:
    """Create vLLM's complete configuration from the parsed arguments, as vLLM's API server does."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    # vLLM's own server passes this flag to the engine; vLLM 0.31 does not have it.
    compat.find_unsupported_reason(
        "late-interaction", lambda: import_cli_args().propagate_flash_late_interaction(args, engine_args)
    )
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    multimodal = config.model_config.multimodal_config
    if multimodal is not None and components.uses_handover(args):
        # vLLM assumes that clients send embeddings to every server that can load KV. Unsuitable ones can crash it.
        multimodal.enable_mm_embeds, multimodal.allow_missing_mm_embeddings = args.enable_mm_embeds, False
    if args.worker_extension_cls == sleep.EXTENSION:
        config.model_config.sleep_mode_backend = sleep.NAME  # vLLM 0.32 has no argument for it
    return config


def create_supported_config(args: Namespace, plan: LaunchPlan) -> Any:
    """Create the configuration without coldstart's KV connector if vLLM rejects the connector, and report the reason."""
    if not components.uses_handover(args):
        return create_config(args)
    try:
        config = create_config(args)
        if not config.model_config.is_encoder_decoder:
            return config
        reason = "vLLM supports no KV connector for encoder-decoder models"
    except Exception as error:  # noqa: BLE001 - the start must not fail because of the connector
        reason = f"{type(error).__name__}: {error}"
    components.drop_handover(args, plan.fallbacks, reason)
    return create_config(args)


def forks_engine(args: Namespace) -> bool:
    """Return whether the engine and its ranks are forked from this process.

    On the CPU, creating the configuration forces "spawn", because OpenMP reads its settings when it is loaded. Our worker
    applies them itself.
    """
    from vllm.platforms import current_platform

    return args.worker_cls == components.WORKER or not current_platform.is_cpu()


def request_fork() -> None:
    """Make vLLM fork the processes of the engine: a spawned one repeats all imports, which takes about 10 s on a GPU.

    vLLM decides again in each process that starts others, for example because CUDA is initialized there. A spawned process
    does not inherit `import_s`, and its workers report the time that its imports took.
    """
    os.environ[START_METHOD] = "fork"
    compat.import_s[:] = [0.0]


@asynccontextmanager
async def start_engine(args: Namespace, plan: LaunchPlan, app: EarlyApplication) -> AsyncIterator[Any]:
    """Start vLLM's engine in a forked process, build `app` meanwhile, and yield the client. Stop the engine on exit."""
    from vllm.usage.usage_lib import UsageContext

    with timeline.measure("configure", track="server"):
        # parse_args has imported our executor if this server uses it.
        if "coldstart.vllm.engine.executor" in sys.modules:
            from coldstart.vllm.engine import executor

            reason = executor.find_worker_mismatch(args, plan)
            if reason and plan.must_adopt:
                # A worker built in a thawed process would crash with an illegal instruction.
                raise WorkerMismatchError(reason)
        config = create_supported_config(args, plan)
        if scheduler.drop_unsupported_scheduler(args, config, plan):
            config = create_config(args)
    if forks_engine(args):
        request_fork()
    # The forked engine inherits our loggers; configuring them again would take longer than adopting a prebuilt worker.
    if config.logging_config.pylogging_config_file is None:
        compat.find_unsupported_reason("logging", lambda: configure_loggers(config.logging_config))
        config.logging_config = replace(config.logging_config, configure_logging=False)
    readiness.report_logged_errors()
    app.start_building_after_fork(args, config)
    collection.postpone_in_children()
    # After SIGTERM, an engine that is starting, stopped or parked would stay without its server, with its memory.
    os.register_at_fork(after_in_child=partial(die_with_parent, signal.SIGKILL))
    # Freeze the imported objects: each gc.collect() of vLLM's loader would scan them for half a second.
    gc.freeze()
    with timeline.measure("start engine", track="server"):
        engine = scheduler.choose_engine_client(config, plan).from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=args.enable_log_requests,
            aggregate_engine_logging=args.aggregate_engine_logging,
            disable_log_stats=args.disable_log_stats,
        )
    compat.find_unsupported_reason(
        "ending", lambda: tolerate_early_exit(engine.engine_core.resources.engine_manager)
    )
    compat.find_unsupported_reason("end-requests", lambda: fail_requests_at_shutdown(engine))
    try:
        yield engine
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)


def tolerate_early_exit(manager: Any) -> None:
    """Make vLLM's engine process manager tolerate an engine process that exits just before the manager kills it.

    The manager checks that the process is alive, and then queries psutil for its children. If the process exits in
    between, psutil raises an error, and vLLM's server never stops.
    """
    if manager is None:
        return
    ended = manager.shutdown

    def shutdown(timeout: float | None = None) -> None:
        with suppress(NoSuchProcess):
            ended(timeout=timeout)

    manager.shutdown = shutdown


def fail_requests_at_shutdown(engine: Any) -> None:
    """Make the shutdown of vLLM's engine fail the requests in progress, and note in `died` whether the engine died before it.

    Call this in the event loop.

    vLLM stops the engine process, and then cancels the task that reads its output. A request in progress would wait
    forever, and so would vLLM's server, which waits for that request. If the task first notices that the engine has
    stopped, it logs a traceback, which is dropped here.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    loop, stop = asyncio.get_running_loop(), engine.shutdown

    def is_other_error(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))

    def shutdown(timeout: float | None = None) -> None:
        vars(engine).setdefault("died", engine.errored)  # which a shutdown makes true
        logging.getLogger(type(engine).__module__).addFilter(is_other_error)
        stop(timeout=timeout)
        with suppress(RuntimeError):  # vLLM calls it again when the loop is closed
            loop.call_soon_threadsafe(engine.output_processor.propagate_error, EngineDeadError())

    engine.shutdown = shutdown


class WorkerMismatchError(RuntimeError):
    """Error for a prebuilt worker that cannot run the launch plan. The message states the difference."""


async def serve(args: Namespace, plan: LaunchPlan) -> int:
    """Run the server. Return 0 after a signal, or 1 if the engine has died or the canary tokens are wrong.

    For other exits, return the code that vLLM's `run_server` would return.
    """
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    address, sock = setup_server(args, reuse_port=False)
    app = EarlyApplication()
    # Only the routes of the development mode put an engine to sleep.
    is_sleeper = args.enable_sleep_mode and VLLM_SERVER_DEV_MODE.read() not in ("", "0")
    if is_sleeper and (used := sleep.choose_backend(args)) is not None:
        plan.fallbacks.append(used)
    async with start_engine(args, plan, app) as engine:
        own_paths = [sleep.STAGE] if args.worker_extension_cls == sleep.EXTENSION else []
        if own_paths and (used := await sleep.manage_worker_weights(engine, str(args.model))) is not None:
            plan.fallbacks.append(used)
        # Ray starts its ranks itself.
        is_forked = forks_engine(args) and args.distributed_executor_backend != "ray"
        ready = Readiness(plan, engine, components.has_reporting_workers(args), own_paths, is_forked)
        if not await ready.check_canary():
            sock.close()
            return 1
        with app.provide_to_vllm():
            capturing: list[asyncio.Task[None]] = []

            async def listening() -> None:
                await ready.report_ready()
                if plan.engine.deferred and not capturing:
                    capturing.append(asyncio.create_task(capture_remaining(engine)))

            shutdown = await build_and_serve(engine, address, sock, args, callback_notify=listening)
            for task in capturing:
                task.cancel()
        died = vars(engine).get("died", engine.errored)
    try:
        await shutdown
    finally:
        sock.close()
    return 1 if died else 0


def run(plan: LaunchPlan, is_imported: bool = False) -> int:
    """Run a server for `plan` in this process, and return its exit code.

    If `is_imported` is True, `import_runtime` was already called.
    """
    plan.install()
    start_progress.start_reporting()
    with readiness.report_failures(), use_scratch_directory():
        return _run(plan, is_imported)


def _run(plan: LaunchPlan, imported: bool) -> int:
    gc.disable()
    if reason := compat.find_unsupported_reason("start", None if imported else import_runtime):
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
    except WorkerMismatchError as reason:
        report_unfit(str(reason))
        return 1


def run_headless(args: Namespace, plan: LaunchPlan) -> int:
    """Run the workers of a headless node with vLLM's own code until they stop, and return the exit code.

    The node reports readiness immediately and without a token: only the first node can generate tokens, and it waits for
    this node. There is no fallback: if vLLM does not support headless nodes, write the reason to stderr and return 1.
    """
    if reason := compat.find_unsupported_reason(
        "headless", lambda: import_module("vllm.entrypoints.cli.serve").run_headless
    ):
        sys.stderr.write(f"coldstart: cannot run a headless node: {reason}\n")
        return 1
    from vllm.entrypoints.cli import serve as command

    report = {"fast_path": {}, "fallbacks": fallback.encode(plan.fallbacks), "tokens": [], "headless": True}
    send_report(take_ready_pipe(), report)
    args.api_server_count = 0  # as vLLM's own command sets it
    if forks_engine(args):
        fork_processes(command)
    else:
        gc.enable()
    command.run_headless(args)
    return 0


def fork_processes(command: Any) -> None:
    """Make `command.run_headless` fork its processes, and postpone their garbage collections until they are warm.

    `command` is vLLM's module, which starts either the workers of one engine or several engines.
    """
    collection.postpone_in_children()
    for name in ("MultiprocExecutor", "CoreEngineProcManager"):
        if (start := getattr(command, name, None)) is not None:
            setattr(command, name, partial(_start_forked, start))


def _start_forked(start: Any, *arguments: Any, **keywords: Any) -> Any:
    request_fork()
    gc.freeze()
    started = start(*arguments, **keywords)
    gc.enable()
    return started


if __name__ == "__main__":
    die_with_supervisor()
    try:
        code = run(LaunchPlan.parse(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except Exception as error:  # noqa: BLE001 - the last frame of this process: report and exit
        readiness.exit_with_error(error)
    sys.exit(code)
