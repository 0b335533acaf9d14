"""Templates of one user: they are started once, found, distinguished from dead ones, and stopped."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest
from coldstart.artifacts import files
from support.processes import wait_until

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError, LaunchRefusedError, UsageError
from coldstart.launch import preparation, server_process, template_environment, template_pool
from coldstart.launch.modes import TEMPLATE_RUNTIME
from coldstart.launch.preparation import prepare_fastest
from coldstart.models.inspection import BundleLookup
from coldstart.system.paths import Cache
from coldstart.system.proc import processes

KEY = "sha256:" + "a" * 64
PLAN = LaunchPlan(["serves"], key=KEY)
FakeEngine = Callable[[str], None]


def test_a_template_is_started_listed_found_and_stopped(fake_engine: FakeEngine) -> None:
    fake_engine("serves")
    assert list(template_pool.list_templates()) == [] and template_pool.find_ready("engine", KEY) is None
    warm = template_pool.start_template("engine", PLAN, "tiny", 20)
    assert list(template_pool.list_templates()) == [warm] == [template_pool.find_ready("engine", KEY)]
    assert warm.ready and warm.servers == ()
    assert template_pool.find_ready("engine", "sha256:" + "b" * 64) is None
    assert template_pool.find_ready("runtime", KEY) is None
    template_pool.stop_template(warm)
    assert list(template_pool.list_templates()) == [] and not warm.directory.exists()
    assert warm.pid is not None and not processes.is_alive(warm.pid, warm.birth)


def test_a_second_start_waits_for_the_first_and_is_refused(fake_engine: FakeEngine, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    fake_engine(f"waits-for:{gate}")
    started: list[template_pool.RunningTemplate] = []
    refused: list[str] = []

    def start() -> None:
        try:
            started.append(template_pool.start_template("engine", PLAN, "tiny", 60))
        except UsageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: list(template_pool._root().glob("*/log")))
    gate.touch()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and "for tiny is already running" in refused[0]
    assert list(template_pool.list_templates()) == started


def test_a_template_that_is_not_ready_in_time_is_ended(fake_engine: FakeEngine) -> None:
    fake_engine("never-ready")
    with pytest.raises(CommandFailedError, match=r"not ready within 0\.3 s") as caught:
        template_pool.start_template("engine", PLAN, "tiny", 0.3)
    assert caught.value.hint == "allow more time with --ready-timeout SECONDS"
    assert list(template_pool._root().glob("*/")) == []


def test_a_signal_after_a_template_is_ready_leaves_no_process_and_no_directory(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupt(pid: int, *_: object) -> None:
        started.append(pid)
        raise KeyboardInterrupt

    fake_engine("serves")
    monkeypatch.setattr(template_pool.fingerprint, "write_fingerprint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        template_pool.start_template("engine", PLAN, "tiny", 20)
    assert not psutil.pid_exists(started[0])
    assert not [path for path in template_pool._root().iterdir() if path.is_dir()]


def test_sweep_removes_a_directory_without_a_start(fake_engine: FakeEngine) -> None:
    fake_engine("serves")
    warm = template_pool.start_template("engine", PLAN, "tiny", 20)
    unfinished = warm.directory.with_name("engine-0123")
    unfinished.mkdir()
    with files.hold_lock(unfinished.with_name("engine-0123.lock")):
        template_pool.remove_unfinished()
        assert unfinished.exists()
    template_pool.remove_unfinished()
    assert not unfinished.exists() and warm.ready


def test_stopped_template_is_killed(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine("serves")
    monkeypatch.setattr(server_process, "TEMPLATE_RESPONSE_S", 0.5)
    warm = template_pool.start_template("runtime", PLAN, "tiny", 20)
    assert warm.pid is not None
    os.kill(warm.pid, signal.SIGSTOP)
    start = SimpleNamespace(request=SimpleNamespace(templates=None, lookup=None), plan=PLAN)
    with pytest.raises(LaunchRefusedError, match=r"the template did not respond within 0\.5 s"):
        TEMPLATE_RUNTIME.launch(cast("Any", start))
    wait_until(lambda: processes.read_identity(cast("int", warm.pid)) is None)
    assert template_pool.find_ready("runtime", PLAN.key) is None


def _recorded(directory: Path, **about: object) -> template_pool.RunningTemplate:
    directory.mkdir(exist_ok=True)
    record = {"level": "engine", "key": KEY, "model": "m", "pid": os.getpid(), "birth": None, "owner": []}
    record |= {"python": "", "environment": {}} | about
    (directory / "about.json").write_text(json.dumps(record))
    return next(warm for warm in template_pool.list_templates() if warm.directory == directory)


def test_a_pid_that_belongs_to_another_template_is_never_signalled(fake_engine: FakeEngine) -> None:
    """The pid of a dead template may belong to the next one."""
    fake_engine("serves")
    other = template_pool.start_template("engine", PLAN, "tiny", 20)
    stale = _recorded(template_pool._root() / "engine-000000000000", pid=other.pid)
    assert stale.pid is None and template_pool.find_ready("engine", KEY) == other
    template_pool.stop_template(
        replace(stale, pid=other.pid), force=True
    )  # simulates that the pid was reused after the listing
    assert other.pid is not None and processes.is_alive(other.pid, other.birth)


IRRELEVANT = {
    "VLLM_PORT_8000_TCP": "tcp://10.43.1.39:8000",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3",
    "VLLM_HOST_IP": "10.1.2.3",
    "VLLM_DP_MASTER_PORT": "29500",
    "MASTER_ADDR": "10.1.2.3",
    "NCCL_SOCKET_IFNAME": "eth0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LOG_LEVEL": "debug",
    "LOGLEVEL": "debug",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOG_STATS_INTERVAL": "5",
    "VLLM_ENABLE_STARTUP_PLAN": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_LOGS": "+dynamo",
}


@pytest.mark.parametrize(("name", "value"), IRRELEVANT.items())
def test_difference_is_none_when_nothing_built_depends_on_the_variable(name: str, value: str) -> None:
    assert template_environment.find_difference({}, {name: value}, "template") is None
    assert template_environment.select_relevant({name: value}) == {}


@pytest.fixture
def plan(lookup: BundleLookup) -> LaunchPlan:
    return LaunchPlan(["serves"], key=lookup.key.digest)


@pytest.fixture(autouse=True)
def templates(home: Path) -> Iterator[None]:
    yield
    for warm in template_pool.list_templates():
        template_pool.stop_template(warm, force=True)


def prepare(lookup: BundleLookup, plan: LaunchPlan) -> preparation.Preparation:
    return prepare_fastest(lookup, plan, lambda name: nullcontext(), 20)


def test_a_template_belongs_to_the_store_that_started_it(
    lookup: BundleLookup, plan: LaunchPlan, fake_engine: FakeEngine, tmp_path: Path
) -> None:
    fake_engine("serves")
    assert prepare(lookup, plan).is_new
    other = replace(lookup, cache=Cache.at(tmp_path / "other"))
    assert not prepare(other, plan).is_new
    assert list(preparation.list_prepared(other.cache)) == []
    assert len(list(preparation.list_prepared(lookup.cache))) == 1


def test_an_unusable_template_is_replaced(
    lookup: BundleLookup, plan: LaunchPlan, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine("serves")
    first = template_pool.start_template("engine", plan, lookup.model.name, 20)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the template was started without it
    assert prepare(lookup, plan).is_new
    (second,) = template_pool.list_templates()
    assert second.pid != first.pid


def test_the_template_of_another_model_with_this_key_is_retained(
    lookup: BundleLookup, plan: LaunchPlan, fake_engine: FakeEngine
) -> None:
    fake_engine("serves")
    other = template_pool.start_template("engine", plan, "other", 20)
    prepared = prepare(lookup, plan)
    assert prepared.mode == "template-runtime"
    assert (
        prepared.failures[0].reason
        == "cannot start a template for tiny: a template of other with the same key is running"
    )
    assert template_pool.find_ready("engine", plan.key) == other


def test_each_failed_level_is_reported(
    lookup: BundleLookup, plan: LaunchPlan, fake_engine: FakeEngine
) -> None:
    fake_engine("dies")
    prepared = prepare(lookup, plan)
    assert prepared.mode is None
    assert [one.stage for one in prepared.failures] == ["template-engine", "template-runtime"]
    assert all("no memory for the template" in one.reason for one in prepared.failures)


def test_a_full_disk_prevents_no_start(
    lookup: BundleLookup, plan: LaunchPlan, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine("serves")
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(template_pool, "start_template", full)
    prepared = prepare(lookup, plan)
    assert prepared.mode is None and "No space left on device" in prepared.failures[0].reason
