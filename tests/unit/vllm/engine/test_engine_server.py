"""Requirements of a server on its forked engine process."""

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import PLAN
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.launch import template_pool
from coldstart.launch.server_process import ServerExitedError
from coldstart.system import runtime
from coldstart.vllm.engine import offline, readiness, server, threads
from coldstart.vllm.engine.rejection import StartFailure

FORKED = """
import asyncio, ctypes, multiprocessing, os
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.async_llm import AsyncLLM

from coldstart.vllm import compat
from coldstart.vllm.engine import server
from coldstart.vllm.engine.application import EarlyApplication
from coldstart.vllm.graphs import entry

app = EarlyApplication()

def engine(*_, **__):
    if os.fork() == 0:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        print("dies by", number.value, flush=True)
        for method in ("fork", "spawn"):  # vLLM decides in each process that starts others
            with ProcessPoolExecutor(1, multiprocessing.get_context(method), entry.register) as rank:
                print(method, rank.submit(compat.build_worker_report).result()["import_s"] > 0, flush=True)
        print("builds the application:", app._thread is not None, flush=True)
        os._exit(0)
    os.wait()
    print("starts by", os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
    core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    return SimpleNamespace(shutdown=lambda timeout: None, engine_core=core)

async def main():
    args = Namespace(worker_cls="other", distributed_executor_backend=None, enable_log_requests=False)
    args.aggregate_engine_logging, args.disable_log_stats, args.kv_transfer_config = False, True, None
    plan = SimpleNamespace(must_adopt=False, fallbacks=[])
    async with server.start_engine(args, plan, app):
        pass

CpuPlatform.is_cpu = lambda self: False
AsyncLLM.from_vllm_config = engine
logging = SimpleNamespace(pylogging_config_file="x")
server.create_config = lambda args: SimpleNamespace(logging_config=logging, additional_config={}, shutdown_timeout=0)
server.scheduler.drop_unsupported_scheduler = lambda *_: False
asyncio.run(main())
"""


def test_an_engine_for_a_gpu_is_forked_and_dies_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reports whether it was spawned all the same."""
    monkeypatch.setenv(server.START_METHOD, "spawn")
    monkeypatch.setenv(PLAN, LaunchPlan([]).variables()[PLAN])
    command = [sys.executable, "-P", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = f"dies by {signal.SIGKILL.value}\nfork False\nspawn True\nbuilds the application: False\n"
    assert f"{expected}starts by fork\n" in done.stdout, done.stderr


@pytest.mark.parametrize("outlived", [False, True])
def test_an_engine_that_ends_just_before_it_is_killed_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch, outlived: bool
) -> None:
    """The process ends between the checks of vLLM's shutdown and of psutil."""
    from vllm.v1 import utils
    from vllm.v1.engine.utils import CoreEngineProcManager

    def kill(pid: int) -> None:
        process.kill()
        process.join()
        psutil.Process(pid).children()

    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    os.kill(process.pid, signal.SIGSTOP)  # so that SIGTERM alone does not end it
    monkeypatch.setattr(utils, "kill_process_tree", kill)
    manager = CoreEngineProcManager.__new__(CoreEngineProcManager)
    manager.processes, manager.manager_stopped = [process], threading.Event()
    manager._request_shutdown_timeout = None
    manager._finalizer = weakref.finalize(manager, tuple)
    if not outlived:
        # If vLLM no longer raises here, `outlive` can be removed.
        with pytest.raises(psutil.NoSuchProcess):
            manager.shutdown(timeout=0)
        return
    server.tolerate_early_exit(manager)
    manager.shutdown(timeout=0)
    assert not process.is_alive()


@pytest.mark.parametrize("handled", [False, True])
def test_shutdown_fails_requests_without_a_traceback(handled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The engine ends before or after vLLM's task that reads its output is cancelled."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    log, resources = logging.getLogger(AsyncLLM.__module__), SimpleNamespace(engine_dead=False)

    def end(timeout: float | None) -> None:
        resources.engine_dead = True
        if handled:
            try:
                raise EngineDeadError()
            except EngineDeadError:
                log.exception("AsyncLLM output_handler failed.")

    async def work() -> None:
        engine = AsyncLLM.__new__(AsyncLLM)
        engine.engine_core = SimpleNamespace(shutdown=end, resources=resources)  # type: ignore[assignment]
        engine.output_handler = None
        engine.output_processor = OutputProcessor(None, log_stats=False)
        waiting = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "0")
        engine.output_processor.request_states["0"] = SimpleNamespace(queue=waiting)  # type: ignore[assignment]
        server.fail_requests_at_shutdown(engine)
        await asyncio.get_running_loop().run_in_executor(None, partial(engine.shutdown, timeout=0))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting.get(), 10)
        engine.shutdown(timeout=0)
        assert engine.errored and not engine.died  # type: ignore[attr-defined]
        engine.engine_core = None  # type: ignore[assignment]

    known = list(log.filters)
    try:
        with caplog.at_level(logging.ERROR):
            log.addHandler(caplog.handler)
            asyncio.run(work())
    finally:
        log.removeHandler(caplog.handler)
        log.filters[:] = known
    assert caplog.records == []


@pytest.mark.parametrize("place", ["launchers", "common"])
def test_the_module_of_the_arguments_is_found_where_each_vllm_has_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.31 and 0.32 have it in `launchers`; 0.33 has it in `common` and also has both packages."""
    for package in ("launchers", "common"):
        (tmp_path / "vllm" / "entrypoints" / package).mkdir(parents=True)
    (tmp_path / "vllm" / "entrypoints" / place / "cli_args.py").write_text("make_arg_parser = 'there'\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vllm" / "__init__.py").touch()
    try:
        assert server.import_cli_args().make_arg_parser == "there"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


def test_watch_log_reports_error_that_vllm_logs_with_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
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
                {"failed": asdict(StartFailure("ValueError: no space for the KV cache"))}
            ]
    finally:
        logger.handlers[:] = before


def test_rejected_arguments_are_reported_without_usage(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = LaunchPlan(Arguments(("--odd",)), key="k")
    with pytest.raises(ServerExitedError, match=r"rejects its arguments: unrecognized .* --odd") as caught:
        template_pool.spawn_template("runtime", plan, home / "socket", 2, 60)
    assert caught.value.is_final and caught.value.exit_code == 2
    assert "Traceback" in (shown := capfd.readouterr().err) and "usage: " not in shown


def test_exit_with_error_runs_the_exit_functions_and_ends_with_the_traceback() -> None:
    program = (
        "import atexit; from coldstart.vllm.engine import readiness; atexit.register(print, 'left')\n"
        "try: raise ValueError('the cause')\nexcept ValueError as error: readiness.exit_with_error(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "left\n") and done.stderr.endswith("ValueError: the cause\n")


@pytest.mark.parametrize(
    ("given", "value", "offline"),
    [("HF_HUB_OFFLINE", "1", True), ("TRANSFORMERS_OFFLINE", "yes", True), ("HF_HUB_OFFLINE", "0", False)],
)
def test_renew_sets_the_offline_switch_of_the_hub(
    given: str, value: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = SimpleNamespace(HF_HUB_OFFLINE=not offline)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)  # type: ignore[arg-type]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(given, value)
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


@pytest.mark.vllm
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_step_ends_with_its_iteration(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """Use vLLM's parser and rule: with one batch in flight the engine has no queue and cannot return early."""
    from vllm.config import VllmConfig

    from coldstart.vllm.engine import server

    monkeypatch.setattr(runtime, "targets_cpu", lambda: on_cpu)
    args, *_ = server.parse_args(
        offline.disable_async_scheduling(Arguments(["--model", "m", "--async-scheduling"]))
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=args.async_scheduling),
        use_v2_model_runner=True,
    )
    assert VllmConfig.max_concurrent_batches.fget(config) == (2 if on_cpu else 1)


def test_forked_rank_is_bound_to_its_cpus_even_with_the_right_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.sched_getaffinity(0)
    lists = [[cpu] for cpu in sorted(before)]
    monkeypatch.setattr(
        threads, "OMPProcessManager", lambda config: SimpleNamespace(skip_setup=False, cpu_lists=lists)
    )
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 1)
    try:
        threads.use_serving_threads(SimpleNamespace(), rank=len(lists) - 1)  # type: ignore[arg-type]
        assert os.sched_getaffinity(0) == set(lists[-1])
    finally:
        os.sched_setaffinity(0, before)
