"""Templates and frozen runtimes hold no secret of their creator, and other users cannot change them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import FakeEngine
from support.processes import find_in_memory, has_ended, wait_until
from tools.machine import require_criu

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.errors import LaunchRefusedError
from coldstart.launch import prepare, process_snapshot, server_process, template_environment, template_pool
from coldstart.models import tiny
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.snapshot import criu_memory

NAMES = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "DB_PASSWORD", "NO_NAME_THAT_TELLS")
# With the variables that a bundle's plan has: the image is made with them.
PLAN = LaunchPlan(Arguments(["says"]), env=prepare.build_inductor_env(Path("/none")))


@pytest.fixture
def cache(home: Path, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    """A user who may freeze, with secrets in the environment and one module of their own among those imported."""
    require_criu(monkeypatch)
    for name in NAMES:
        monkeypatch.setenv(name, f"PLANTED-{name}")
    (home / "frozen").mkdir(mode=0o700)
    monkeypatch.setattr(paths, "frozen_dir", lambda: home / "frozen")
    monkeypatch.setattr(tiny, "build_tiny_model", lambda name, models: tmp_path / name)
    fake_engine("says")
    return Cache.at()


def _thawed(cache: Cache) -> server_process.RestoredTemplate:
    image = process_snapshot.find_runtime(cache)
    assert image is not None
    return process_snapshot.restore_template(image, PLAN)


def _server_output(cache: Cache, behaviour: str, file: Path) -> str:
    """Return the output of a server forked from a newly thawed template; both processes have exited."""
    thawed, saved = _thawed(cache), os.dup(2)
    with file.open("w") as out:
        os.dup2(out.fileno(), 2)
        try:
            process, reader = server_process.fork_server(
                replace(PLAN, vllm_args=Arguments([behaviour])), thawed.socket, thawed
            )
            server_process.await_readiness(process, reader, time.monotonic(), 20)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    process.signal(signal.SIGKILL)
    process.wait()
    return file.read_text()


def test_image_contains_no_secret_and_its_server_uses_environment_and_directory_of_its_caller(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = process_snapshot.freeze_runtime(cache, 60)
    assert sum(path.stat().st_size for path in image.iterdir()) > 1 << 20  # memory is among them
    assert [path.name for path in image.iterdir() if b"PLANTED-" in path.read_bytes()] == []
    assert {path.stat().st_mode & 0o777 for path in image.iterdir()} == {0o600}
    monkeypatch.setenv("SAID", "by the caller")
    monkeypatch.chdir(tmp_path)
    assert _server_output(cache, "says", tmp_path / "said").startswith(f"{tmp_path} by the caller")
    assert list(paths.runtime_dir().glob("thawed-*")) == []


def test_thaw_refused_at_any_moment_leaves_no_files(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    process_snapshot.freeze_runtime(cache, 60)
    for milliseconds in range(0, 100, 10):

        def refuse(images: Path, plan: LaunchPlan, seconds: float = milliseconds / 1000) -> None:
            time.sleep(seconds)
            raise LaunchRefusedError("refused")

        monkeypatch.setattr(process_snapshot, "require_matching_image", refuse)
        with pytest.raises(LaunchRefusedError, match="refused"):
            _thawed(cache)
        assert list(paths.runtime_dir().glob("thawed-*")) == [], milliseconds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda image: os.chown(image, 64321, 64321),
        lambda image: os.chown(image / "inventory.img", 64321, 64321),
        lambda image: (image / "inventory.img").chmod(0o666),
        lambda image: os.truncate(image / "pages-1.img", 4096),
        lambda image: os.truncate(image / criu_memory.MEMORY_FILE, 4096),
    ],
    ids=["owner", "owner of a file", "mode", "truncated", "mapped memory"],
)
def test_thaw_does_not_start_criu_when_another_user_could_have_written_the_image(
    cache: Cache, spoil: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = process_snapshot.freeze_runtime(cache, 60)
    spoil(image)
    monkeypatch.setattr(process_snapshot, "_spawn", lambda *_: pytest.fail("CRIU was started"))
    with pytest.raises(LaunchRefusedError):
        _thawed(cache)


def test_thaw_refuses_image_of_another(cache: Cache, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    process_snapshot.freeze_runtime(cache, 60)
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    with pytest.raises(LaunchRefusedError, match="was not created on this machine"):
        _thawed(cache)


def test_thawed_servers_share_no_random_state(cache: Cache, tmp_path: Path) -> None:
    process_snapshot.freeze_runtime(cache, 60)
    drawn = [_server_output(cache, "draws", tmp_path / name).split() for name in ("one", "two")]
    assert len(drawn[0]) == len(drawn[1]) == 3
    assert [one for one, two in zip(*drawn, strict=True) if one == two] == []


@pytest.mark.slow
def test_freeze_leaves_no_process_and_no_image_when_killed(cache: Cache, home: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from coldstart.system import paths; from coldstart.models import tiny\n"
        f"sys.executable = {sys.executable!r}\n"
        f"paths.frozen_dir = lambda: Path({str(home / 'frozen')!r})\n"
        f"tiny.build_tiny_model = lambda name, models: Path({str(tmp_path)!r})\n"
        "from coldstart.launch import process_snapshot\n"
        "process_snapshot.fingerprint.write_fingerprint = lambda *_: "
        "(print('built', flush=True), __import__('time').sleep(60))\n"
        "process_snapshot.freeze_runtime(paths.Cache.at(), 60)\n"
    )
    maker = subprocess.Popen([f"{sys.prefix}/bin/python", "-P", "-c", script], stdout=subprocess.PIPE)
    assert maker.stdout is not None and maker.stdout.readline() == b"built\n"
    (template,) = processes.list_children(maker.pid)
    maker.kill()
    maker.wait()
    wait_until(lambda: has_ended(template))
    assert process_snapshot.find_runtime(cache) is None
    assert process_snapshot.freeze_runtime(cache, 60).is_dir()
    assert [path.name for path in cache.runtimes.iterdir() if path.name.startswith(".partial")] == []


PLACES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "VLLM_API_KEY",
    "OPENAI_API_KEY", "WANDB_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "PGPASSWORD", "AZURE_CLIENT_SECRET", "SLACK_WEBHOOK_URL",
    "JWT_SECRET", "S3_SECRET_ACCESS_KEY", "COLDSTART_PREFETCH_TOKEN", "NO_NAME_THAT_TELLS", "VLLM_OF_A_URL",
)  # fmt: skip
PLANTED = {name: f"PLANTED-{number:02}" for number, name in enumerate(PLACES)}
PLANTED["VLLM_OF_A_URL"] = "https://user:PLANTED-17@host/"
ARGUMENTS = ["serves", "--api-key", "PLANTED-18", "--hf-token=PLANTED-19"]
ARGUMENTS += [
    "--allowed-origins",
    "https://user:PLANTED-22@host",
    "--hf-overrides",
    '{"s3_secret": "PLANTED-23"}',
]


def plan(*arguments: str) -> LaunchPlan:
    return LaunchPlan(
        list(arguments),
        key="sha256:" + "a" * 64,
        env={"MY_TOKEN": "PLANTED-20", "OMP_NUM_THREADS": "1"},
        weights_from=WeightsRequest("https://user:PLANTED-21@host/weights", Path("/plan.json")),
    )


@pytest.fixture
def warm(
    home: Path, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[template_pool.RunningTemplate]:
    fake_engine("serves")
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    started = template_pool.start_template("engine", plan(*ARGUMENTS), "tiny", 20)
    yield started
    template_pool.stop_template(started, force=True)


def test_template_holds_no_secret_of_its_starter(warm: template_pool.RunningTemplate) -> None:
    for name in ("environ", "cmdline"):
        assert b"PLANTED" not in Path(f"/proc/{warm.pid}/{name}").read_bytes()
    assert find_in_memory(warm.pid or 0, b"PLANTED-") == []
    kept = [path for path in warm.directory.rglob("*") if path.is_file() and b"PLANTED-" in path.read_bytes()]
    assert kept == []
    about = json.loads((warm.directory / "about.json").read_text())
    assert about["environment"]["OMP_NUM_THREADS"] == "1"


def test_template_holds_no_secret_of_a_server_that_it_forks(warm: template_pool.RunningTemplate) -> None:
    process, reader = server_process.fork_server(plan(*ARGUMENTS), warm.socket)
    report = server_process.await_readiness(process, reader, time.monotonic(), 20).report
    assert report["args"] == ARGUMENTS[1:]
    assert find_in_memory(warm.pid or 0, b"PLANTED-") == []


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("s3://bucket/w", True),
        ("https://me:word@host/w", False),
        ("https://host/w?X-Amz-Signature=ab", False),
    ],
)
def test_plan_names_the_source_when_it_holds_no_credential(source: str, kept: bool) -> None:
    request = WeightsRequest(source, Path("/plan.json"))
    redacted = template_environment.redact_plan(LaunchPlan([], weights_from=request))
    assert redacted.weights_from == (request if kept else None)
