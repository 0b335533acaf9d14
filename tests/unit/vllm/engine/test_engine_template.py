"""The accept loop of a template: forks, leases and exits, with a fake engine."""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs.library import fake_cuda
from support.processes import busy_s, exhaust_descriptors, has_ended, wait_until
from tools import tiny_models

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import server_process, template_pool
from coldstart.system.ipc import json_lines, peers
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import await_readable
from coldstart.vllm.engine import collection, server


def plan(*behaviour: str) -> LaunchPlan:
    return LaunchPlan(list(behaviour), key="sha256:" + "a" * 64)


@pytest.fixture
def warm(home: Path, fake_engine: Callable[[str], None]) -> Iterator[template_pool.RunningTemplate]:
    fake_engine("serves")
    made = template_pool.start_template("engine", plan(), "tiny", 20)
    yield made
    template_pool.stop_template(made, force=True)


def start(warm: template_pool.RunningTemplate, *behaviour: str) -> server_process.ReadyServer:
    process, reader = server_process.fork_server(plan(*behaviour), warm.socket)
    return server_process.await_readiness(process, reader, time.monotonic(), 20)


def send_request(connection: Channel, request: object, *descriptors: int) -> None:
    """Send the request of a server as a client does: only the forked server reads it."""
    private = json_lines.create_sealed_memfd(json.dumps(request).encode())
    connection.send({}, (private, *descriptors))
    os.close(private)


def test_server_uses_directory_and_environment_of_the_client(
    warm: template_pool.RunningTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAID", "something")
    (tmp_path / "in").write_text("read from the client")
    with (tmp_path / "in").open() as source, (tmp_path / "out").open("w") as sink:
        saved = os.dup(0), os.dup(2)
        os.dup2(source.fileno(), 0)
        os.dup2(sink.fileno(), 2)
        try:
            running = start(warm, "says")
        finally:
            os.dup2(saved[0], 0)
            os.dup2(saved[1], 2)
    assert (tmp_path / "out").read_text().split(maxsplit=2) == [
        str(tmp_path),
        "something",
        "read from the client\n",
    ]
    running.process.signal(signal.SIGKILL)
    assert running.process.wait() == 137


def test_invalid_plan_is_refused_with_the_reason(
    warm: template_pool.RunningTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    invalid = plan().document() | {"engine": None}
    monkeypatch.setattr(LaunchPlan, "document", lambda _: invalid)
    with pytest.raises(
        server_process.ServerExitedError, match="invalid launch plan: Expected `object`, got `null`"
    ):
        start(warm)


def test_end_of_the_lease_ends_the_server_and_not_the_template(warm: template_pool.RunningTemplate) -> None:
    forked = start(warm, "serves").process
    assert isinstance(forked, server_process.ForkedServer) and not has_ended(forked.pid)
    forked.connection.close()
    wait_until(lambda: has_ended(forked.pid))
    assert not await_readable(start(warm, "serves").process, timeout_s=0)


def test_client_that_disconnects_at_once_leaves_no_server(warm: template_pool.RunningTemplate) -> None:
    for _ in range(20):
        with Channel(peers.connect(warm.socket)) as connection:
            request = {"plan": plan("serves").document(), "cwd": "/", "env": dict(os.environ), "now": 0.0}
            reader, writer = os.pipe()
            send_request(connection, request, 0, 2, 2, writer, reader)
        os.close(reader)
        os.close(writer)
    wait_until(lambda: not next(iter(template_pool.list_templates())).servers)
    assert not await_readable(start(warm, "serves").process, timeout_s=0)


def test_malformed_request_is_answered_with_an_error(warm: template_pool.RunningTemplate) -> None:
    for sent in (b"\xff\xff\xff\xff\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}"):
        with Channel(peers.connect(warm.socket)) as client:
            client.socket.sendall(sent)
            client.socket.shutdown(socket.SHUT_WR)
            (answer,) = client.iterate_replies()
            assert "JSON" in answer["error"] or "truncated" in answer["error"]
    with peers.connect(warm.socket):
        pass
    assert not await_readable(start(warm, "serves").process, timeout_s=0)


def test_request_without_what_server_needs_ends_the_server_alone(warm: template_pool.RunningTemplate) -> None:
    for request in (
        {},
        {"cwd": "/nowhere", "env": {}, "plan": {}, "now": 0},
        {"cwd": "/", "env": {}, "plan": {"x": 1}},
        [],
    ):
        with Channel(peers.connect(warm.socket)) as client:
            send_request(client, request)
            answers = list(client.iterate_replies())
            assert answers[-1] == {"exit": 1}
    assert not await_readable(start(warm, "serves").process, timeout_s=0)


def test_template_without_descriptors_reports_it_and_rests(warm: template_pool.RunningTemplate) -> None:
    assert warm.pid is not None
    with Channel(peers.connect(warm.socket)) as client:  # the template is ready
        client.socket.shutdown(socket.SHUT_WR)
        assert list(client.iterate_replies())
    with exhaust_descriptors(warm.pid):
        with pytest.raises(peers.PeerError, match=r"closed the connection|Broken pipe"):
            server_process.fork_server(plan("serves"), warm.socket)
        waiting = [peers.connect(warm.socket) for _ in range(5)]
        assert busy_s(warm.pid, 0.5) < 0.25
        assert [one.recv(1) for one in waiting] == [b""] * 5
    assert not await_readable(start(warm, "serves").process, timeout_s=0)


def test_sigterm_stops_the_template_and_its_servers(warm: template_pool.RunningTemplate) -> None:
    running = start(warm, "serves")
    assert warm.pid is not None
    os.kill(warm.pid, signal.SIGTERM)
    assert running.process.wait() == 137  # the template ended without reporting an exit status
    wait_until(lambda: has_ended(running.process.pid))
    wait_until(lambda: not warm.socket.exists())


GPU_TEMPLATE = """
import ctypes, sys, torch
from pathlib import Path
from unittest import mock
from vllm.platforms.cpu import CpuPlatform
from coldstart.contract.plan import LaunchPlan
from coldstart.system import runtime
from coldstart.vllm.engine import server, template

import_engine, import_modules = server.import_engine, server.import_gpu_engine
streams = {name: getattr(torch.cuda, name) for name in ("Stream", "Event", "current_stream", "synchronize")}

def import_without_the_cpu():
    with mock.patch.object(CpuPlatform, "is_cpu", lambda self: False):
        import_engine()
    modules = [name for name in sys.modules if "cpu_worker" in name or name.endswith("cpu.shm")]
    print("replaced", modules + [name for name, was in streams.items() if getattr(torch.cuda, name) is not was])

def import_gpu_engine(config):
    answers = iter([True])  # to the function itself, not to the modules, whose kernels the CPU build lacks
    CpuPlatform.is_cuda = lambda self: next(answers, False)
    import_modules(config)

server.import_gpu_engine, runtime.targets_cpu = import_gpu_engine, lambda: False
server.import_engine = import_without_the_cpu
plan = LaunchPlan(["--model", sys.argv[1], "--max-model-len", "64"])
before = set(sys.modules)
fallbacks = template.build_template(plan, "runtime")
print("imported", *(name for name in sys.modules if name not in before), fallbacks)
Path(sys.argv[2], "libcuda.so.1").symlink_to(sys.argv[3])
assert not template.is_cuda_initialized()
ctypes.CDLL("libcuda.so.1").cuInit(0)
template.build_template(plan, "runtime")
"""


@pytest.mark.vllm
def test_template_for_a_gpu_imports_its_engine_and_refuses_when_cuda_is_initialized(tmp_path: Path) -> None:
    """The CPU build has the modules of a GPU's engine; a double takes the driver's place.

    vLLM's cpu/shm.py, which the CPU worker imports, replaces torch.cuda's streams and events: a GPU engine would use these.
    """
    paths = tiny_models.shared("tiny-opt"), tmp_path, fake_cuda()._name
    command = [sys.executable, "-P", "-c", GPU_TEMPLATE, *paths]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    (imported,) = (line.split() for line in done.stdout.splitlines() if line.startswith("imported"))
    needed = {
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.attention.backends.flash_attn",
        "vllm.model_executor.models.opt",
    }
    assert needed <= set(imported) and set(server.MODEL_RUNNERS) & set(imported) and imported[-1] == "[]"
    assert "\nreplaced []\n" in f"\n{done.stdout}"
    assert done.stderr.rstrip().endswith("a forked process could not use the GPU")


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The collections and freezes that really ran."""
    ran: list[str] = []
    for name in collection._OWN:
        monkeypatch.setitem(collection._OWN, name, lambda *_, name=name: ran.append(name))
        monkeypatch.setattr(gc, name, collection._OWN[name])
    yield ran
    gc.enable()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own core and GPU worker, with the hooks; undone afterwards."""
    pytest.importorskip("vllm")
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    @contextlib.contextmanager
    def memory_profiling() -> Iterator[str]:
        gc.collect()
        yield "profile"
        gc.collect()

    monkeypatch.setattr(core, "freeze_gc_heap", core.freeze_gc_heap)
    for process in (core.EngineCoreProc, gpu_worker.Worker):
        monkeypatch.setattr(process, "shutdown", process.shutdown)
    monkeypatch.setattr(gpu_worker, "freeze_gc_heap", gpu_worker.freeze_gc_heap)
    monkeypatch.setattr(gpu_worker, "memory_profiling", memory_profiling)
    return gpu_worker


def test_no_collection_runs_until_the_worker_is_warm(worker: Any, collections: list[str]) -> None:
    collection.postpone_in_process()
    assert collections == ["freeze"] and not gc.isenabled()
    collections.clear()
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    with freeze_gc_for_cudagraph_capture():
        gc.collect(2)
    assert collections == []
    worker.freeze_gc_heap()
    assert collections == ["collect", "freeze"] and gc.isenabled()


def test_a_warm_engine_freezes_as_vllm_does_and_collects_nothing_when_it_ends(
    worker: Any, collections: list[str]
) -> None:
    collection.postpone_in_process()
    worker.freeze_gc_heap()
    collections.clear()
    from vllm.v1.engine import core

    core.freeze_gc_heap()
    assert collections == ["collect"] * 3 + ["freeze"]
    collections.clear()
    structured = SimpleNamespace(clear_backend=lambda: None)
    core.EngineCoreProc.shutdown(
        SimpleNamespace(structured_output_manager=structured, model_executor=None, scheduler=None)
    )
    assert collections == []
    collection._restore()
    elastic = SimpleNamespace(shutdown=lambda: gc.collect(2))
    worker.Worker.shutdown(SimpleNamespace(profiler=None, elastic_ep_executor=elastic))
    assert collections == []


def test_one_collection_runs_before_memory_is_profiled(worker: Any, collections: list[str]) -> None:
    collection.postpone_in_process()
    collections.clear()
    with worker.memory_profiling() as result:
        assert result == "profile" and collections == ["collect", "freeze"]
    assert collections == ["collect", "freeze"] and not gc.isenabled()
    worker.freeze_gc_heap()
    collections.clear()
    with worker.memory_profiling():
        assert collections == ["collect"]
    assert collections == ["collect", "collect"]


@pytest.mark.parametrize("name", ["MultiprocExecutor", "CoreEngineProcManager"])
def test_headless_node_postpones_the_collections_of_its_processes_alone(
    worker: Any, collections: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    after: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: after.append(after_in_child))
    monkeypatch.setenv(server.START_METHOD, "spawn")

    def start(number: int) -> int:
        assert os.environ[server.START_METHOD] == "fork" and not gc.isenabled()
        after[0]()
        gc.collect()
        return number

    command = SimpleNamespace(**{name: start})
    gc.disable()
    server.fork_processes(command)
    assert getattr(command, name)(5) == 5 and gc.isenabled() and collections == ["freeze"]
    collections.clear()
    collection._restore()
    after[0]()  # in a process that a warm one forks
    gc.collect()
    assert gc.isenabled() and collections == ["collect"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_warms_up_in_eager_mode_and_then_collects_in_its_own_process(
    worker: Any, collections: list[str], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    from vllm.config import CompilationMode
    from vllm.v1.worker.cpu_worker import CPUWorker

    from coldstart.vllm.engine.worker import ColdWorker

    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda _: None)
    rank = ColdWorker.__new__(ColdWorker)
    rank.parallel_config, runs = SimpleNamespace(world_size=ranks), list[int]()
    rank.compilation_config = SimpleNamespace(mode=CompilationMode.NONE)
    rank.model_runner, rank.restored, rank.warm = SimpleNamespace(_dummy_run=runs.append), False, False
    rank.warm_up()
    assert len(runs) == ranks - 1
    collection.postpone_in_process()
    rank.compile_or_warm_up_model()
    assert gc.isenabled() is (ranks > 1)
