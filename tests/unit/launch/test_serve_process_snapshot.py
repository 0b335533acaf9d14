"""A snapshot is thawed only if it fits; each refusal names the expected and the found value."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import UntrustedError
from coldstart.artifacts.store import Store
from support.engines import FakeEngine, FakeThawed
from tools.bundles import publish_sections, write_tree

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError, LaunchRefusedError
from coldstart.launch import process_snapshot, server_process, template_environment, template_pool
from coldstart.launch.server import Server
from coldstart.models import inspection, tiny
from coldstart.system import fingerprint, paths
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.snapshot import criu, runtime_image

PLAN = LaunchPlan([])
FakeCriu = Callable[[int], Path]
FAKE_CRIU = """#!/bin/sh
case "$1" in
--version) echo "Version: 9.8.7"; exit 0 ;;
esac
echo "$@" >> "{calls}"
while [ $# -gt 0 ]; do
  case "$1" in -D|-W) place="$2" ;; -o) log="$2" ;; esac
  shift
done
case "$log" in /*) ;; *) log="$place/$log" ;; esac
echo "Warn  all is well" > "$log"
echo "Error (criu/tty.c:1): no such terminal" >> "$log"
exit {code}
"""


@pytest.fixture
def fake_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Return fake_criu(code), which installs a CRIU with that exit code and returns the file of its calls but --version."""
    calls = tmp_path / "calls"

    def make(code: int) -> Path:
        program = tmp_path / "criu"
        program.write_text(FAKE_CRIU.format(calls=calls, code=code))
        program.chmod(0o755)
        monkeypatch.setenv(criu.VARIABLE, str(program))
        monkeypatch.setattr(criu, "_read_capabilities", lambda: (1 << 64) - 1)
        return calls

    criu.read_version.cache_clear()
    yield make
    criu.read_version.cache_clear()


def images(scratch: Path, *, kernel: str | None = None, files: str | None = None, **about: object) -> Path:
    """Return a directory like that of `freeze` with a fake image that depends on this file."""
    made = {
        "criu": "4.2.1",
        "environment": template_environment.select_relevant(os.environ),
        "meeting": str(scratch / "frozen" / "meeting"),
    } | about
    machine = fingerprint.read_machine_properties() | ({"kernel": kernel} if kernel else {})
    states = fingerprint.read_states([__file__]) if files is None else files
    tree = {"pages-1.img": b"x" * 99, runtime_image.ABOUT: json.dumps(made).encode()}
    tree[fingerprint.ABOUT] = json.dumps({"machine": machine, "files": states}).encode()
    return write_tree(scratch / "images", tree)


def frozen(store: Store, scratch: Path, signer: sign.HostKey | None = None, **changes: object) -> Bundle:
    """Publish a bundle and write a fake image of its engine."""
    return keep(store, images(scratch, **changes), signer)  # type: ignore[arg-type]


def keep(store: Store, tree: Path, signer: sign.HostKey | None = None) -> Bundle:
    bundle = publish_sections(store, signer=signer or sign.load_host_key(paths.state_dir()))
    with runtime_image.publish_image(
        runtime_image.choose_engine_image_directory(Cache.at().runtimes, bundle.digest)
    ) as image:
        for file in tree.iterdir():
            shutil.copy(file, image)
    return bundle


def thaw(bundle: Bundle) -> server_process.RestoredTemplate:
    return process_snapshot.thaw_engine(bundle, PLAN, Cache.at(), inspection.trust)


@pytest.mark.usefixtures("home")
class TestThaw:
    def test_untrusted_image_is_not_restored(self, store: Store, tmp_path: Path, fake_criu: FakeCriu) -> None:
        calls = fake_criu(0)
        with pytest.raises(UntrustedError):
            thaw(frozen(store, tmp_path, sign.load_host_key(tmp_path / "stranger")))
        assert not calls.exists() and list(Cache.at().unpacked.glob("*")) == []

    def test_an_image_in_a_copied_cache_is_not_restored(
        self, store: Store, tmp_path: Path, fake_criu: FakeCriu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = fake_criu(1)
        bundle = frozen(store, tmp_path)
        with pytest.raises(LaunchRefusedError):
            thaw(bundle)
        calls.unlink()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
        with pytest.raises(UntrustedError):
            thaw(bundle)
        assert not calls.exists()

    def test_thaw_is_refused_when_the_check_fails(
        self, store: Store, tmp_path: Path, fake_criu: FakeCriu
    ) -> None:
        """The check runs in parallel with CRIU and ends it; CRIU may or may not have begun."""
        fake_criu(0)
        with pytest.raises(LaunchRefusedError, match=r"kernel 3\.1"):
            thaw(frozen(store, tmp_path, kernel="3.1"))
        assert list(paths.runtime_dir().glob("thawed-*")) == []

    @pytest.mark.parametrize("odd", [None, b"{", b"{}", b"[]"])
    def test_thaw_refuses_an_image_without_a_record(
        self, store: Store, tmp_path: Path, fake_criu: FakeCriu, odd: bytes | None
    ) -> None:
        calls = fake_criu(0)
        tree = {"pages-1.img": b"x"} | ({runtime_image.ABOUT: odd} if odd is not None else {})
        bundle = keep(store, write_tree(tmp_path / "images", tree))
        with pytest.raises(LaunchRefusedError):
            thaw(bundle)
        assert not calls.exists()

    @pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs CAP_SYS_ADMIN")
    def test_thaw_reports_the_error_of_criu_and_leaves_nothing(
        self, store: Store, tmp_path: Path, fake_criu: FakeCriu, home: Path
    ) -> None:
        calls = fake_criu(1)
        with pytest.raises(
            LaunchRefusedError, match=r"cannot thaw the snapshot with CRIU: Error .* no such terminal"
        ):
            thaw(frozen(store, tmp_path, meeting=str(home / "meeting")))
        assert "restore -D" in calls.read_text()
        assert list(paths.runtime_dir().glob("thawed-*")) == []


@pytest.fixture
def out(home: Path, tmp_path: Path, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an image of the fake engine, whose socket will be in `home`."""
    fake_engine("serves")
    monkeypatch.setattr(process_snapshot, "create_frozen_socket_dir", lambda: home)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_dump_that_fails_leaves_no_template(out: Path, fake_criu: FakeCriu) -> None:
    calls = fake_criu(1)
    with pytest.raises(
        CommandFailedError, match=r"cannot freeze the engine with CRIU: Error .* no such terminal"
    ):
        process_snapshot.freeze_template(LaunchPlan([]), out, 20)
    pid = int(calls.read_text().split(" -t ")[1].split()[0])
    assert not Path(f"/proc/{pid}").exists()


def test_freeze_records_the_dependencies(out: Path, home: Path, fake_criu: FakeCriu) -> None:
    fake_criu(0)
    unshared = process_snapshot.freeze_template(LaunchPlan([]), out, 20)
    assert unshared is not None and "reads all of its memory from the image" in unshared  # fake images
    made = json.loads((out / runtime_image.ABOUT).read_text())
    assert made["criu"] == "9.8.7" and made["meeting"] == str(home)
    listed = (out / fingerprint.ABOUT).read_text()
    assert "python" in listed and "coldstart/launch/process_snapshot.py" in listed
    assert not (home / fingerprint.MODULES).exists()
    process_snapshot.require_matching_image(out, LaunchPlan([]))


def test_a_thawed_template_ends_with_its_namespaces(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    own = tmp_path / "own"
    own.mkdir()
    thawed = server_process.RestoredTemplate(own, process, own.rmdir)
    thawed.end()
    assert process.poll() is not None and not own.exists() and thawed.socket == own / "socket"


SERVED = LaunchPlan(Arguments(["serves", "--port", "7"]))


@pytest.fixture
def frozen_plans(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> list[LaunchPlan]:
    """Replace freezing by writing one file; return the received plans."""
    plans: list[LaunchPlan] = []

    def freeze(plan: LaunchPlan, out: Path, timeout: float, level: str = "engine") -> None:
        assert level == "runtime"
        plans.append(plan)
        (out / "pages-1.img").write_bytes(b"x")

    monkeypatch.setattr(criu, "find_limit", lambda: None)
    monkeypatch.setattr(tiny, "build_tiny_model", lambda name, models: tmp_path / name)
    monkeypatch.setattr(process_snapshot, "freeze_template", freeze)
    return plans


def test_frozen_plan_contains_no_model_of_the_user(frozen_plans: list[LaunchPlan], tmp_path: Path) -> None:
    cache = Cache.at()
    assert process_snapshot.find_runtime(cache) is None
    image = process_snapshot.freeze_runtime(cache, 9)
    assert process_snapshot.find_runtime(cache) == image and image.parent == cache.runtimes
    (plan,) = frozen_plans
    assert list(plan.vllm_args) == ["--model", str(tmp_path / "tiny-llama")]
    assert (plan.key, plan.weights, plan.compile_dir, plan.canary) == ("", "", None, None)


def test_freeze_reports_a_full_disk_and_leaves_no_file(
    frozen_plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(process_snapshot, "freeze_template", full)
    with pytest.raises(CommandFailedError, match="No space left on device"):
        process_snapshot.freeze_runtime(Cache.at(), 9)
    assert {path.name for path in Cache.at().runtimes.iterdir()} == {".lock", ".scratch.lock"}


# The ladder.


@pytest.fixture
def start(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Return start(mode), which starts a fake server that is stopped afterwards."""
    return lambda mode: start_server(SERVED, mode)


@pytest.fixture
def thawed(
    start: object, frozen_plans: list[LaunchPlan], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeThawed]:
    """Freeze the runtime; thawing returns a template. Only CRIU and its namespaces are fakes."""
    process_snapshot.freeze_runtime(Cache.at(), 9)
    plan = replace(SERVED, key="another")
    process = template_pool.spawn_template("runtime", plan, home / "thawed", subprocess.DEVNULL, 20)
    made = FakeThawed(home / "thawed", process)
    monkeypatch.setattr(process_snapshot, "restore_template", lambda image, plan: made)
    monkeypatch.setattr(processes, "find_outer_pid", lambda _, pid: pid)
    yield made
    made.end()


@pytest.mark.parametrize("mode", ["auto", "runtime-snapshot"])
def test_image_starts_another_model(start: Callable[..., Server], thawed: FakeThawed, mode: str) -> None:
    document = start(mode).document()
    assert document["mode"] == "runtime-snapshot" and document["fast_path"]["mode"]
    assert [step["section"] for step in document["fallbacks"]] == []


def test_start_is_fresh_with_a_reason_when_the_thawed_template_refuses(
    start: Callable[..., Server], thawed: FakeThawed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = Mock(side_effect=LaunchRefusedError("the snapshot was made with /a.py (sha256 0), found 1"))
    monkeypatch.setattr(process_snapshot, "restore_template", refuses)
    document = start("runtime-snapshot").document()
    assert document["mode"] == "fresh" and "/a.py" in document["fallbacks"][0]["reason"]
