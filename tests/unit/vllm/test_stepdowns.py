"""A feature whose vLLM integration point is missing falls back, and the starter gets the reason. No feature stops a server."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.scheduling import SchedulerSettings
from coldstart.vllm import compat, stock
from coldstart.vllm.engine import headless, offline, server, stepdowns
from coldstart.vllm.scheduling import SCHEDULER_CLS
from coldstart.vllm.weights import entry
from coldstart.vllm.weights.extension import Reporting

REASON = "It lacks an integration point."
DEADLINES = json.dumps(SchedulerSettings("deadline").additional_config())


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set of features whose integration points this vLLM lacks."""
    held: set[str] = set()
    monkeypatch.setattr(compat, "check", lambda feature, load=None: REASON if feature in held else None)
    return held


def arguments(**given: object) -> Namespace:
    sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1)
    named = {"load_format": "auto", "worker_cls": "auto", "worker_extension_cls": ""}
    return Namespace(**{**sizes, **named, "distributed_executor_backend": None, **given})


@pytest.fixture
def cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set vLLM's platform to the CPU."""
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


def test_our_worker_is_used_when_compatible(lacking: set[str], cpu_platform: None) -> None:
    args = arguments(load_format=entry.LOAD_FORMAT)
    assert stepdowns.settle(args) == []
    assert (args.worker_cls, args.distributed_executor_backend) == (stepdowns.WORKER, stepdowns.EXECUTOR)
    assert args.load_format == entry.LOAD_FORMAT and stepdowns.reports(args)


def test_vllm_worker_runs_when_ours_is_incompatible(lacking: set[str], cpu_platform: None) -> None:
    lacking.add("worker")
    args = arguments(load_format=entry.LOAD_FORMAT)
    fallbacks = stepdowns.settle(args)
    assert [fallback.stage for fallback in fallbacks] == ["worker", "compile"]
    assert all(fallback.reason.startswith(REASON) for fallback in fallbacks)
    assert (args.worker_cls, args.distributed_executor_backend) == ("auto", None)
    # The loader is still ours and reports its load.
    assert args.worker_extension_cls == stepdowns.EXTENSION and stepdowns.reports(args)


def test_vllm_loader_runs_when_ours_is_incompatible(lacking: set[str], cpu_platform: None) -> None:
    lacking.add("weights")
    args = arguments(load_format=entry.LOAD_FORMAT)
    (fallback,) = stepdowns.settle(args)
    assert fallback == Fallback("weights", f"{REASON} vLLM's own loader reads them.")
    assert args.load_format == "auto" and args.worker_cls == stepdowns.WORKER


@pytest.mark.vllm
def test_vllms_loader_is_registered_when_ours_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor import model_loader

    monkeypatch.setattr(compat, "fallbacks", found := [])
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, entry.LOAD_FORMAT, None)
    monkeypatch.setitem(sys.modules, "coldstart.vllm.weights.loader", None)
    entry._add.__wrapped__()
    loader = model_loader.get_model_loader(LoadConfig(load_format=entry.LOAD_FORMAT))
    assert isinstance(loader, model_loader.DefaultModelLoader) and loader.load_config.load_format == "auto"
    assert found[0].stage == "weights" and "lacks an integration point" in found[0].reason
    assert Reporting().coldstart_report()["fast_path"] == {"weights": False}


@pytest.mark.vllm
def test_vllms_worker_runs_when_ours_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from coldstart.vllm.engine import executor

    monkeypatch.setattr(compat, "fallbacks", found := [])
    chosen = SimpleNamespace(worker_cls=stepdowns.WORKER, worker_extension_cls="")
    config = SimpleNamespace(parallel_config=chosen)
    monkeypatch.setattr(executor, "_import_worker", lambda: None)
    executor.require_worker(config)  # type: ignore[arg-type]
    assert (chosen.worker_cls, found) == (stepdowns.WORKER, [])
    monkeypatch.setattr(executor, "_import_worker", lambda: import_module("vllm.gone"))
    executor.require_worker(config)  # type: ignore[arg-type]
    assert chosen.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert chosen.worker_extension_cls == stepdowns.EXTENSION
    assert found[0].stage == "worker" and "vllm.gone" in found[0].reason


@pytest.mark.vllm
def test_start_with_a_failed_import_runs_stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "import_runtime", lambda: import_module("vllm.gone"))
    monkeypatch.setattr(stock, "run", lambda plan, reason: reason)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert "No module named 'vllm.gone'" in str(server.run(LaunchPlan(["--model", "m"])))
    assert gc.isenabled()


def test_incompatible_start_runs_stock_vllm(lacking: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lacking.add("start")
    monkeypatch.setattr(server, "import_runtime", lambda: pytest.fail("imported"))
    monkeypatch.setattr(stock, "run", lambda plan, reason: (list(plan.vllm_args), reason))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert server.run(LaunchPlan(["--model", "m"])) == (["--model", "m"], REASON)
    assert gc.isenabled()


class Health(BaseHTTPRequestHandler):
    """Connection that is refused twice and then ready."""

    asked = 0

    def do_GET(self) -> None:
        Health.asked += 1
        self.send_response(200 if self.path == "/health" and Health.asked > 2 else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Do nothing."""


def test_stock_server_is_reported_ready_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    listener = HTTPServer(("127.0.0.1", 0), Health)
    line: list[bytes] = []

    def as_vllm(module: str, run_name: str) -> None:
        assert (module, run_name) == (stock.ENTRY_POINT, "__main__")
        assert sys.argv[1:] == ["--model", "m", "--port", str(listener.server_port)]
        assert READY_FD_ENV not in os.environ
        thread = Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        line.append(os.read(reader, 1 << 16))
        listener.shutdown()
        thread.join()
        raise SystemExit(3)

    monkeypatch.setattr(stock.runpy, "run_module", as_vllm)
    monkeypatch.setattr(sys, "argv", ["server"])
    plan = LaunchPlan(["--model", "m", "--port", str(listener.server_port)], fallbacks=[Fallback("a", "b")])
    assert stock.run(plan, REASON) == 3
    report = json.loads(line[0])
    assert report["fallbacks"] == [
        {"section": "a", "reason": "b"}, {"section": "start", "reason": f"{REASON} vLLM's own server runs."}
    ]  # fmt: skip
    assert report["fast_path"] == {"start": False} and report["tokens"] == [] and Health.asked > 2
    assert os.read(reader, 1) == b""  # one line only
    os.close(reader)


class _AtASocket(HTTPServer):
    """HTTP server at a Unix socket, like vLLM with --uds."""

    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


def test_stock_server_is_probed_at_its_socket(tmp_path: Path) -> None:
    """The server listens at no port and was never reported as ready."""
    Health.asked = 2
    listener = _AtASocket(str(tmp_path / "s"), Health)  # type: ignore[arg-type]
    thread = Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    reader, writer = os.pipe()
    stock._acknowledge(LaunchPlan(["--model", "m", "--uds", str(tmp_path / "s")]), writer)
    listener.shutdown()
    thread.join()
    assert json.loads(os.read(reader, 1 << 16))["fast_path"] == {"start": False}
    os.close(reader)


def test_stock_server_receives_only_supported_arguments(lacking: set[str]) -> None:
    ours = ["--scheduler-cls", SCHEDULER_CLS, "--additional-config", "{}", "--kv-transfer-config", "{}"]
    words = ["--model", "m", "--load-format", entry.LOAD_FORMAT, *ours, "--port", "9"]
    plan = LaunchPlan(Arguments(words))
    assert stock._its_own(plan) == ["--model", "m", "--load-format", entry.LOAD_FORMAT, "--port", "9"]
    assert [fallback.stage for fallback in plan.fallbacks] == ["scheduler"]
    lacking.add("weights")
    assert stock._its_own(plan) == ["--model", "m", "--port", "9"]
    assert plan.fallbacks[-1] == Fallback("weights", f"{REASON} vLLM's own loader reads them.")
    plan = LaunchPlan(Arguments(["--scheduling-policy", "priority", "--additional-config", DEADLINES]))
    assert stock._its_own(plan) == []
    assert plan.fallbacks[-1].reason == "vLLM's own server gives requests no deadlines."
    # The user's own object may have a member of any name.
    users = Arguments(["--additional-config", '{"their_plugin": {"policy": "deadline"}}'])
    assert stock._its_own(LaunchPlan(users)) == list(users)
    users = Arguments(["--scheduler-cls", "their.Own", "--additional-config", "{}", "--load-format", "dummy"])
    assert stock._its_own(LaunchPlan(users)) == list(users)


def test_node_without_an_api_reports_why_it_does_not_run(
    lacking: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lacking.add("headless")
    assert headless.run(Namespace(), LaunchPlan([])) == 1
    assert REASON in capsys.readouterr().err


@pytest.mark.parametrize("feature", ["start", "offline"])
def test_nothing_is_materialized_with_the_reason(lacking: set[str], feature: str, tmp_path: Path) -> None:
    lacking.add(feature)
    with pytest.raises(SystemExit, match=f"cannot materialize: {REASON}"):
        offline.run(LaunchPlan([]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def _engine(worker: str = stepdowns.WORKER, *, compiles: bool = True) -> Any:
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker))
    return SimpleNamespace(config=config, compiles=compiles)


def test_bundle_without_compiled_code_has_the_reason(lacking: set[str]) -> None:
    assert offline.not_compiled(_engine()) is None
    assert "compiles no part" in str(offline.not_compiled(_engine(compiles=False)))
    assert "uses another" in str(offline.not_compiled(_engine("vllm.v1.worker.cpu_worker.CPUWorker")))
    several = SimpleNamespace(config=_engine("vllm.v1.worker.cpu_worker.CPUWorker").config)
    assert "uses another" in str(offline.not_compiled(several))  # ranks in separate processes expose no model
    lacking.add("compile")
    assert offline.not_compiled(_engine()) == REASON


class Stock:
    """Fake of vLLM's worker without a device."""

    def init_device(self) -> None:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        self.model_runner = CPUModelRunner.__new__(CPUModelRunner)

    def load_model(self, **_: object) -> None:
        """Load nothing."""

    def compile_or_warm_up_model(self) -> str:
        return "times"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[LaunchPlan], Any]:
    """Return worker(plan), which creates a ColdWorker on the fake."""
    pytest.importorskip("vllm")
    from coldstart.vllm.engine import worker as module

    def make(plan: LaunchPlan) -> Any:
        monkeypatch.setattr(module.LaunchPlan, "current", lambda: plan)
        names = ("init_device", "load_model", "compile_or_warm_up_model")
        for name in names:
            monkeypatch.setattr(module.CPUWorker, name, getattr(Stock, name), raising=False)
        monkeypatch.setattr(module.entry, "register", lambda: None)
        made = module.ColdWorker.__new__(module.ColdWorker)
        made.init_device()
        return made

    return make


@pytest.mark.vllm
def test_compiled_code_that_cannot_be_restored_is_compiled(
    lacking: set[str], worker: Any, tmp_path: Path
) -> None:
    lacking.add("compile")
    made = worker(LaunchPlan([], compile_dir=str(tmp_path)))
    made.load_model()
    assert made.fallbacks == [Fallback("compile", REASON)]
    assert made.fast_path == {"compile": False} and not made.restored


@pytest.mark.vllm
def test_an_arena_that_cannot_be_left_to_the_kernel_is_zeroed(lacking: set[str], worker: Any) -> None:
    from coldstart.vllm.engine.worker import CPUModelRunner, LazyKvRunner

    assert type(worker(LaunchPlan([])).model_runner) is LazyKvRunner
    lacking.add("lazy-kv")
    made = worker(LaunchPlan([]))
    assert type(made.model_runner) is CPUModelRunner
    assert made.fallbacks == [Fallback("kv", REASON)]


@pytest.mark.vllm
@pytest.mark.parametrize("feature", ["template", "worker"])
def test_a_template_without_our_worker_still_serves(
    lacking: set[str], feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldstart.vllm.engine import template

    lacking.add(feature)
    for name in ("import_runtime", "import_engine", "import_gpu_engine"):
        monkeypatch.setattr(template.server, name, lambda *_: None)
    monkeypatch.setattr(template.server, "parse_args", lambda _: (Namespace(), []))
    monkeypatch.setattr(template.server, "configure", lambda _: None)
    monkeypatch.setattr(template.application, "warm", lambda *_: None)
    monkeypatch.setattr(template, "prebuild_worker", lambda _: pytest.fail("built"))
    monkeypatch.setattr(template.threading, "active_count", lambda: 1)
    monkeypatch.setattr(template.gc, "freeze", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert template.build(LaunchPlan([]), "runtime") == []
    assert template.build(LaunchPlan([]), "engine") == [
        Fallback("template", f"{REASON} Each server builds its own worker.")
    ]


def test_no_template_is_built_where_our_start_does_not_fit(lacking: set[str]) -> None:
    from coldstart.vllm.engine import template

    lacking.add("start")
    with pytest.raises(RuntimeError, match=REASON):
        template.build(LaunchPlan([]), "runtime")


@pytest.mark.parametrize(("given", "told"), [([], None), (["--no-enable-flash-late-interaction"], False)])
def test_late_interaction_setting_reaches_the_engine(
    given: list[str], told: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", lambda self, usage_context: self)
    args, _ = server.parse_args(["--model", "some/model", *given])
    pooler = server.configure(args).pooler_config
    assert (pooler and pooler.enable_flash_late_interaction) is told
