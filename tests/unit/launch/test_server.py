"""The handle of an embedded server: state, exit codes, and its end with its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engines import FakeEngine
from support.processes import has_ended, wait_until
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import driver, ladder, planning, server_process
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache
from coldstart.vllm.engine import rejection

Start = Callable[..., Server]
HERE, PYTHON = Path(__file__).parent, sys.executable
HOLDER = """
import os, signal, sys
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import driver, planning
from test_server import make_request
sys.executable = sys.argv[1]
planning.plan = lambda request: LaunchPlan(Arguments(["serves"]))
print(driver.start_server(make_request()).pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make_request() -> ServeRequest:
    """Return a request for a model that is never read; its plan is a fake."""
    model, cache = ResolvedModel("tiny", Path("tiny"), None, None, {}), Cache(Path("cache"))
    lookup = BundleLookup(model, Arguments(), cache, key())
    return ServeRequest(lookup, mode="fresh", without_bundle=True, ready_timeout=20)


@pytest.fixture
def start(home: Path, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return start(behaviour), which starts a server of the fake engine that is stopped afterwards."""
    fake_engine("serves")
    started: list[Server] = []

    def run(behaviour: str = "serves") -> Server:
        plan = LaunchPlan(Arguments([behaviour, "--port", "7"]))
        monkeypatch.setattr(planning, "plan", lambda request: plan)
        started.append(driver.start_server(make_request()))
        return started[-1]

    yield run
    for one in started:
        one.stop(timeout_s=0)


def test_server_has_ended_after_the_block(start: Start) -> None:
    with start() as one:
        assert one.is_running() and not has_ended(one.pid)
        assert (one.url, one.mode, one.fallbacks) == ("http://127.0.0.1:7", "fresh", ())
        assert 0 < one.ready_s < 20
    assert not one.is_running() and has_ended(one.pid)
    assert one.wait() == one.stop() == 143


def test_stop_kills_when_the_server_ignores_sigterm(start: Start) -> None:
    assert start("stubborn").stop(timeout_s=0.2) == 137


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_server_ends_with_the_process_that_started_it(start: Start, end: str) -> None:
    command = [PYTHON, "-c", HOLDER, sys.executable, end]
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as holder:
        assert holder.stdout is not None
        server = int(holder.stdout.readline())
        # The fake server ends by itself after 60 s.
        wait_until(lambda: has_ended(server), 30.0)


def test_server_stops_when_its_caller_was_interrupted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, started, real = threading.Event(), list[Server](), ladder.start_server

    def slow(request: ServeRequest, plan: LaunchPlan) -> Server:
        started.append(real(request, plan))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        interrupted.wait(20)
        return started[-1]

    monkeypatch.setattr(ladder, "start_server", slow)
    # A shell that runs the tests in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupted.set()
    wait_until(lambda: has_ended(started[0].running.process.pid))


CHILD = """
import sys
from coldstart.system.start_progress import StartProgress, write_progress
for done in (1, 2):
    write_progress(int(sys.argv[1]), StartProgress("profile", done, 2, "sizes"))
sys.exit(3)
"""


def test_wait_ends_with_the_exit_code_after_each_report_when_the_pipe_stays_open() -> None:
    said: list[str] = []
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(writer)], pass_fds=[writer])
    with pytest.raises(server_process.ServerExitedError) as caught:
        server_process.await_readiness(
            server_process.ChildServer(process), reader, 0.0, None, lambda one: said.append(one.describe())
        )
    os.close(writer)
    assert (caught.value.code, said) == (3, ["profile: 1 of 2 sizes", "profile: 2 of 2 sizes"])


def test_wait_ends_the_workers_of_a_server_that_ended_before_a_signal() -> None:
    command = ["sh", "-c", "sleep 60 &"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    child = server_process.ChildServer(process)
    wait_until(lambda: has_ended(process.pid))
    child.signal(signal.SIGTERM)
    assert child.wait() == 0
    process.communicate(timeout=20)  # until the worker closes its end of the pipe


@pytest.mark.parametrize(
    ("behaviour", "cause", "hint"),
    [
        ("dies-of", "ValueError: no space for the KV cache", None),
        ("loses-engine", "a process of vLLM's engine was killed or crashed", "if memory ran out"),
    ],
)
def test_end_of_the_engine_has_its_cause(
    fake_engine: FakeEngine, behaviour: str, cause: str, hint: str | None
) -> None:
    fake_engine(behaviour)
    process, reader = server_process.start_fresh(LaunchPlan([behaviour, "--port", "9"]))
    with pytest.raises(CommandFailedError, match=f"before it was ready: {cause}") as caught:
        server_process.await_readiness(process, reader, time.monotonic(), 20)
    assert (caught.value.hint is None) if hint is None else (hint in str(caught.value.hint))


def test_launch_fails_when_the_server_is_never_ready(fake_engine: FakeEngine) -> None:
    fake_engine("never-ready")
    process, reader = server_process.start_fresh(LaunchPlan(["never-ready"]))
    with pytest.raises(CommandFailedError, match=r"not ready within 0\.3 s and was killed") as caught:
        server_process.await_readiness(process, reader, time.monotonic(), 0.3)
    assert caught.value.hint == "allow more time with --ready-timeout SECONDS"
    assert process.wait() == 137


# Texts of vLLM 0.32.0.
TOO_LONG = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (4096) is greater than the derived max_model_len \
(max_position_embeddings=2048.0 or model_max_length=None in model's config.json). To allow overriding this maximum, set \
the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. [type=value_error, input_value=ArgsKwargs((), {'model': '/m'}), input_type=A]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""
SCARCE = """(EngineCore pid=7) ERROR 11-26 13:20:49 [core.py:1510] ValueError: Available memory on node 0 (15.2/20.21 GiB) \
on startup is less than desired CPU memory utilization (0.99, 20.01 GiB). On the CPU backend, the \
`--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name).
RuntimeError: Engine core initialization failed. See root cause above.
"""
SMALL_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (1024), (0.5 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (0.1 GiB). Try increasing `gpu_memory_utilization`"
)
ARCHITECTURE = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architecture MptForCausalLM was supported in vLLM until v0.28.0, and is not supported anymore. Please \
use an older version of vLLM if you want to use this model architecture. [type=value_error, input_type=ArgsKwargs]
"""
UNIMPORTABLE = "ModuleNotFoundError: No module named 'av'\nModel architectures ['A'] failed to be inspected."


@pytest.mark.parametrize(
    ("text", "message", "hint", "code"),
    [
        (
            TOO_LONG,
            "vLLM rejects its arguments: User-specified max_model_len (4096) is greater than the derived max_model_len"
            " (max_position_embeddings=2048.0 or model_max_length=None in model's config.json).",
            "change the vLLM arguments",
            2,
        ),
        (
            ARCHITECTURE,
            "vLLM cannot run this model: Model architecture MptForCausalLM was supported in vLLM until v0.28.0, and is not"
            " supported anymore.",
            "use a model that this version of vLLM supports",
            1,
        ),
        (
            SCARCE,
            "vLLM has too little memory for its arguments: Available memory on node 0 (15.2/20.21 GiB) on startup is less"
            " than desired CPU memory utilization (0.99, 20.01 GiB).",
            "--kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization",
            1,
        ),
        (
            SCARCE.replace("Available memory on node 0", "Free memory on device cuda:0").replace(
                "CPU mem", "GPU mem"
            ),
            "Free memory on device cuda:0 (15.2/20.21 GiB) on startup is less than desired GPU memory utilization",
            "--kv-cache-memory-bytes 268435456, or use a smaller --gpu-memory-utilization",
            1,
        ),
        (UNIMPORTABLE, "the code of this model: No module named 'av'", "install this package", 1),
        (SMALL_CACHE, "the available KV cache memory (0.1 GiB).", "a smaller --max-model-len", 1),
    ],
)
def test_rejection_is_one_line_with_a_hint(text: str, message: str, hint: str, code: int) -> None:
    # A server reports its error in one line.
    for form in (text, " ".join(text.split())):
        found = rejection.find_known_failure(form)
        assert found is not None
        assert message in found.message and hint in found.hint and found.exit_code == code
        assert "\n" not in found.message


def test_other_errors_are_no_rejection() -> None:
    for text in ("", "ValueError: no space", "INFO: Available memory on node 0", "1 validation error"):
        assert rejection.find_known_failure(text) is None
