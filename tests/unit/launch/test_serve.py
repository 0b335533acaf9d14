"""The ladder of start modes: the requested mode, or the next one with the reason, down to fresh."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import TrustResult
from support.engines import FakeEngine, FakeThawed

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.launch import ladder, process_snapshot, server, server_process, template_pool
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server
from coldstart.models.inspection import BundleLookup
from coldstart.system.ipc import json_lines, peers
from coldstart.system.proc import processes
from coldstart.system.snapshot import runtime_image

CANARY = {"prompt": [5], "tokens": [1]}
PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]), canary=CANARY)


@pytest.fixture
def started(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Return started(mode, **changes of the plan), which starts a server that is stopped afterwards."""

    def start(mode: str, **changes: object) -> Server:
        return start_server(replace(PLAN, **changes), mode)  # type: ignore[arg-type]

    return start


@pytest.fixture
def template(
    lookup: BundleLookup, fake_engine: FakeEngine
) -> Iterator[Callable[[str], template_pool.RunningTemplate]]:
    """Return template(level), which starts a warm template for the bundle's key."""
    fake_engine("serves")
    made: list[template_pool.RunningTemplate] = []

    def start(level: str) -> template_pool.RunningTemplate:
        made.append(template_pool.start_template(level, replace(PLAN, key=lookup.key.digest), "tiny", 20))
        return made[-1]

    yield start
    for warm in made:
        template_pool.stop_template(warm, force=True)


@pytest.fixture
def thawed(
    lookup: BundleLookup, fake_engine: FakeEngine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeThawed]:
    """Give the bundle a snapshot whose thaw returns an engine template. Only CRIU and its namespaces are fakes."""
    fake_engine("serves")
    socket = home / "thawed"
    plan = replace(PLAN, key=lookup.key.digest)
    process = template_pool.spawn_template("engine", plan, socket, subprocess.DEVNULL, 20)
    thawed = FakeThawed(socket, process)
    assert lookup.bundle is not None
    image = runtime_image.choose_engine_image_directory(lookup.cache.runtimes, lookup.bundle.digest)
    image.mkdir(parents=True)
    monkeypatch.setattr(process_snapshot, "thaw_engine", lambda *_: thawed)
    monkeypatch.setattr(processes, "find_outer_pid", lambda _, pid: pid)
    yield thawed
    thawed.end()


Started = Callable[..., Server]
Template = Callable[[str], template_pool.RunningTemplate]


def test_untrusted_bundle_is_omitted_when_its_start_fails(
    lookup: BundleLookup, fake_engine: FakeEngine
) -> None:
    """Its plain sections, such as a KV cache of one byte, must not prevent a start."""
    fake_engine("serves")
    dying = replace(PLAN, vllm_args=Arguments(["dies"]), canary=None)
    request = ServeRequest(
        lookup, mode="fresh", ready_timeout=20, trust=lambda _: TrustResult(False, None, "no")
    )
    one = ladder.start_server(request, dying)
    one.stop(timeout_s=0)
    (step,) = one.unused.fallbacks
    assert one.mode == "fresh" and step.stage == "bundle" and "has no trusted signature" in step.reason
    assert not one.document()["fast_path"]["mode"] and "is not trusted" in one.plan.fallbacks[0].reason
    with pytest.raises(server_process.ServerExitedError, match="exited with code 7"):
        ladder.start_server(ServeRequest(lookup, mode="fresh", ready_timeout=20), dying)


@pytest.mark.parametrize("mode", ["fresh", "template-runtime", "auto"])
def test_weights_that_are_lost_while_the_server_starts_are_read_from_the_models_directory(
    lookup: BundleLookup, template: Template, tmp_path: Path, mode: str
) -> None:
    template("runtime")
    plan = replace(
        PLAN,
        vllm_args=Arguments(["loses-weights"]),
        weights_from=WeightsRequest("http://weights.example", tmp_path),
    )
    request = ServeRequest(lookup, mode=mode, ready_timeout=20, weights_from="http://weights.example")
    one = ladder.start_server(request, plan)
    one.stop(timeout_s=0)
    (step,) = [step for step in one.unused.fallbacks if step.stage == "weights"]
    assert "does not match its digest" in step.reason and "the model's directory" in step.reason
    assert one.mode == "fresh" and one.plan.weights_from is None
    assert one.plan.vllm_args.get_value("model") == str(lookup.model.path)


def test_auto_names_a_template_that_died(started: Started, template: Template) -> None:
    warm = template("engine")
    assert warm.pid is not None
    os.kill(warm.pid, signal.SIGKILL)
    os.waitpid(warm.pid, 0)
    document = started("auto").document()
    assert document["mode"] == "fresh" and document["fast_path"]["mode"] is False
    assert [step["section"] for step in document["fallbacks"]] == ["template-engine"]
    absent = [step["section"] for step in document["absent"]]
    assert absent == ["standby", "parked", "snapshot", "template-runtime", "runtime-snapshot"]


def test_find_mode_lists_templates_once_per_mode(
    lookup: BundleLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, listed = lookup.model.name, list[Path | None]()
    others = [("engine", "another key", model), ("runtime", "", "another model")]

    def count(root: Path | None = None) -> list[template_pool.RunningTemplate]:
        listed.append(root)
        return [template_pool.RunningTemplate(level, key, Path(), name, 1) for level, key, name in others]

    monkeypatch.setattr(template_pool, "list_templates", count)
    _, skipped = ladder.find_planned_mode(ServeRequest(lookup), PLAN)
    reasons = [one.reason for one in skipped if one.stage.startswith("template-")]
    assert listed == [None, None] and ["other arguments" in one for one in reasons] == [True, False]


def test_start_falls_back_when_the_template_refuses(
    started: Started, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    template("engine")
    monkeypatch.setattr(json_lines.Channel, "send", _refused)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    one = started("template-engine")
    assert one.mode == "fresh" and one.unused.fallbacks[0].reason == "not now"
    monkeypatch.undo()
    one.stop(timeout_s=0)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208 - the process's own pidfd


@pytest.mark.parametrize("mode", ["fresh", "template-engine"])
def test_wrong_canary_causes_a_fresh_start_on_the_same_socket(
    started: Started, template: Template, tmp_path: Path, mode: str
) -> None:
    template("engine")
    words = Arguments(["forgets", "--uds", str(tmp_path / "socket")])
    env = {"TORCHINDUCTOR_CACHE_DIR": "/unpacked/inductor", "VLLM_CACHE_ROOT": "/cache"}
    one = started(mode, vllm_args=words, compile_dir="/unpacked", env=env)
    assert one.plan.compile_dir is None and one.plan.env == {"VLLM_CACHE_ROOT": "/cache"}
    (fallback,) = one.document()["fallbacks"]
    assert fallback["section"] == "canary" and mode in fallback["reason"]
    assert one.mode == "fresh" and one.document()["canary"] is None
    assert not peers.await_readable(one.running.process, timeout_s=0)


@pytest.mark.parametrize("mode", ["template-engine", "template-runtime"])
def test_start_falls_back_on_the_same_socket_when_a_forked_server_dies(
    started: Started, template: Template, tmp_path: Path, mode: str
) -> None:
    template(mode.removeprefix("template-"))
    for asked in (mode, "auto"):
        one = started(asked, vllm_args=Arguments(["dies-forked", "--uds", str(tmp_path / asked)]))
        (step,) = one.document()["fallbacks"]
        assert one.mode == "fresh" and not peers.await_readable(one.running.process, timeout_s=0)
        assert step["section"] == mode and "code 7 before it was ready" in step["reason"]
        assert one.document()["fast_path"]["mode"] is False


def test_start_does_not_replace_the_socket_of_another_server(
    started: Started, template: Template, tmp_path: Path
) -> None:
    template("runtime")
    with peers.Listener(tmp_path / "socket"):
        with pytest.raises(server_process.ServerExitedError, match="Address already in use"):
            started("template-runtime", vllm_args=Arguments(["serves", "--uds", str(tmp_path / "socket")]))
        peers.connect(tmp_path / "socket").close()


def test_start_falls_back_when_a_thawed_server_dies(started: Started, thawed: FakeThawed) -> None:
    one = started("auto", vllm_args=Arguments(["dies-forked"]))
    (step,) = one.document()["fallbacks"]
    assert one.mode == "fresh" and step["section"] == "snapshot" and "exited with code 7" in step["reason"]
    assert thawed.ends == 1 and thawed.process.poll() is not None


class Fake:
    """Process that exits with `code` after its supervisor has passed on each signal."""

    pid = 1

    def __init__(self, code: int, *numbers: int) -> None:
        self.code, self.numbers, self.received = code, numbers, list[int]()
        self.began = threading.Event()

    def live(self) -> None:
        self.began.wait()
        for count, number in enumerate(self.numbers, 1):
            os.kill(os.getpid(), number)
            while len(self.received) < count:
                time.sleep(0.001)
        os.close(self.ends)

    def __enter__(self) -> Fake:
        self.alive, self.ends = os.pipe()
        threading.Thread(target=self.live, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.alive)

    def wait(self) -> int:
        return self.code

    def signal(self, number: int) -> None:
        self.received.append(number)

    def fileno(self) -> int:
        self.began.set()
        return self.alive


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("process", "code", "passed_on"),
    [
        (Fake(143, signal.SIGTERM), 143, [signal.SIGTERM]),
        (Fake(0, signal.SIGTERM), 143, [signal.SIGTERM]),
        (Fake(0, signal.SIGINT), 130, [signal.SIGTERM]),
        (Fake(137, signal.SIGINT, signal.SIGINT), 130, [signal.SIGTERM, signal.SIGKILL]),
        (Fake(1), 1, []),
        (Fake(0), 1, []),
        (Fake(137), 1, []),
        (Fake(3), 1, []),  # 3 would mean that no bundle fits
    ],
)
def test_the_exit_code_of_a_server(process: Fake, code: int, passed_on: list[int]) -> None:
    with process:
        assert server.supervise(process) == code and process.received == passed_on


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("handlers")
def test_a_signal_that_does_not_interrupt_the_wait_is_passed_on() -> None:
    """Simulate a signal just before the wait: another thread receives it."""
    with Fake(143, signal.SIGTERM) as process:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            assert server.supervise(process) == 143 and process.received == [signal.SIGTERM]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refused(*_: object) -> None:
    raise peers.PeerError("not now")
