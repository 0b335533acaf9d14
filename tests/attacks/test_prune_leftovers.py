"""What killed commands and removed bundles leave behind is removed; odd stores and file systems are read."""

import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from coldstart.artifacts import canonical, files, sign
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from support.processes import wait_until
from tools.bundles import NAME, config, key, plant, publish, publish_sections, write_tree
from tools.command_line import Run

from coldstart.launch import caches, pruning
from coldstart.materialize.materialize import create_workspace
from coldstart.models import tiny
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import scratch
from coldstart.system.recording import record_timeline
from coldstart.system.trust import unpacked
from coldstart.validate.checks import check


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Replace the directory that all tests of this user share: others unpack there meanwhile."""
    monkeypatch.setattr(paths, "frozen_dir", lambda: home / "frozen")


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _unpack(bundle: Bundle) -> Path:
    return unpacked.unpack_section(bundle, "compile", Cache.at().unpacked, accept_any)


def _other(store: Store, home: Path) -> Bundle:
    """Publish a later version with other code."""
    code = write_tree(home / "other", {"k.so": b"\x7fELF" + bytes(200_000)})
    return publish_sections(store, compile=code)


def test_prune_removes_unpacked_sections_of_removed_bundles(run: Run, store: Store, home: Path) -> None:
    old = _unpack(publish(store, home / "s"))
    kept = _unpack(_other(store, home))
    planned = json.loads(run("prune", "--dry-run", "--format=json").stdout)
    assert str(old) in planned["unpacked"] and old.is_dir() and planned["freed_bytes"] > 0
    done = json.loads(run("prune", "--format=json").stdout)
    assert done["unpacked"] == planned["unpacked"] and done["freed_bytes"] == planned["freed_bytes"]
    assert not old.exists() and kept.is_dir()
    assert not (paths.state_dir() / "unpacked" / old.name).exists()
    run("prune", "org/tiny")
    assert not kept.exists() and not list(Cache.at().unpacked.glob("[0-9a-f]*"))


def test_prune_retains_the_cache_of_another_store_alone(run: Run, store: Store, home: Path) -> None:
    mine, theirs = publish(store, home / "s"), publish(Store(home / "other" / "bundles"), home / "s")
    roots = (Cache.at().unpacked, home / "other/unpacked", paths.compiled_dir())
    bundles = (mine, theirs, mine)
    places = [
        unpacked.unpack_section(one, "compile", root, accept_any)
        for one, root in zip(bundles, roots, strict=True)
    ]
    run("prune", "org/tiny")
    # What the stores share is unpacked again by the next start of the other one.
    assert [place.is_dir() for place in places] == [False, True, False]
    assert len(list((paths.state_dir() / "unpacked").glob("[0-9a-f]*"))) == 1


def test_prune_retains_files_that_a_process_has_mapped(store: Store, home: Path) -> None:
    place = _unpack(publish(store, home / "s"))
    with (place / "kernel.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert pruning.prune(Cache.at(), ["org/tiny"]).unpacked == () and place.is_dir()
    assert pruning.prune(Cache.at()).unpacked == (place,) and not place.exists()


def test_prune_retains_files_with_other_names(home: Path) -> None:
    root = Cache.at().unpacked
    left = root / f".{'a' * 64}.123.old"
    for name in ("notes", "a" * 63, "A" * 64, ".keep", left.name):
        (root / name).mkdir(parents=True)
    assert pruning.prune(Cache.at()).unpacked == (left,)
    assert len(list(root.iterdir())) == 4


def test_prune_removes_files_of_killed_servers(run: Run, store: Store, home: Path) -> None:
    gone, alive = (paths.runtime_dir() / f"thawed-{name}" for name in ("gone", "alive"))
    scratch = paths.temporary_dir() / "server-12345678"
    for directory in (gone, alive):
        directory.mkdir(parents=True, mode=0o700)
    held = files.try_lock(alive / "lock")
    assert held is not None
    run("prune", "--dry-run")
    assert gone.is_dir()
    # No process holds its lock. Commands of other tests, which run at the same time, remove it, too.
    scratch.mkdir(mode=0o700, exist_ok=True)
    run("prune")
    assert not gone.exists() and not scratch.exists() and alive.is_dir()
    os.close(held)


def _newer(store: Store) -> Bundle:
    """Publish a bundle of format 2.0 with the same key."""
    return plant(store, canonical.serialize(config(format_version="2.0")))


def test_list_shows_all_bundles_when_one_is_newer(run: Run, store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    newer = _newer(store)
    shown = run("list").stdout
    assert f"{NAME}:v1" in shown and f"{NAME}:v2" in shown and "newer" in shown
    assert run("list", "-q").stdout.split() == [mine.ref, f"{NAME}@{newer.digest}"]
    listed = json.loads(run("list", "--format=json").stdout)["bundles"]
    assert "CS-FORMAT-NEW" in listed[1]["problem"] and listed[0]["digest"] == mine.digest


def test_find_returns_the_readable_bundle_when_another_is_newer(store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    _newer(store)
    assert store.find_by_key(key()) == mine and store.find_by_reference(NAME) == mine


def test_prune_retains_readable_and_newer_bundle(run: Run, store: Store, home: Path) -> None:
    old = publish(store, home / "s")
    mine = publish(store, home / "s", blocks=9)
    newer = _newer(store)
    run("prune")
    assert store.list_bundles() == [mine, newer] and old not in store.list_bundles()
    assert check(mine) == [] and newer.read_image_manifest()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_host_key_needs_no_hard_links(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(number, os.strerror(number))))
    made = sign.load_host_key(tmp_path)
    assert sign.load_host_key(tmp_path).fingerprint == made.fingerprint
    path = tmp_path / "signing" / "host.pem"
    assert path.stat().st_mode & 0o077 == 0 and not list(path.parent.glob(".*.partial"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_publish_reports_missing_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(BundleError) as caught:
        publish(Store(tmp_path / "store"), tmp_path)
    assert caught.value.code == "CS-LOCK" and "--cache-dir" in caught.value.hint


def test_readers_need_no_file_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish(Store(tmp_path / "store"), tmp_path)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    assert Store(tmp_path / "store").list_bundles() == [made] and check(made) == []


SCRATCH = """
import sys
from coldstart.system.proc.scratch import use_scratch_directory
with use_scratch_directory():
    print("up", flush=True)
    sys.stdin.read()
"""
RECORD = """
import sys
from coldstart.system.recording import record_timeline
with record_timeline():
    print("up", flush=True)
    sys.stdin.read()
"""
SPAWN = """
import subprocess, sys
from pathlib import Path
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import template_pool
popen = subprocess.Popen
def slow(*command, **options):
    print("up", flush=True)
    sys.stdin.read()
template_pool.subprocess.Popen = slow
template_pool.spawn_template("runtime", LaunchPlan([]), Path("socket"), -3, 20)
"""
LAY = """
import shutil, sys
from pathlib import Path
from coldstart.launch import caches
copytree = shutil.copytree
def slow(*places):
    copytree(*places)
    print("up", flush=True)
    sys.stdin.read()
shutil.copytree = slow
caches.copy_section(Path(sys.argv[1]), Path(sys.argv[2]))
"""
BUILD = """
import sys
from pathlib import Path
from coldstart.models import tiny
print("up", flush=True)
tiny.build_tiny_model("tiny-llama", Path(sys.argv[1]))
"""


def _killed(script: str, *arguments: str) -> None:
    """Run a script until it reports, and kill it."""
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.kill()
    process.wait()


def _recordings() -> set[Path]:
    return set(paths.temporary_dir().glob("recording-*"))


@pytest.mark.parametrize("by", ["prune", "recording"])
def test_killed_recording_is_removed(run: Run, home: Path, by: str) -> None:
    # Other tests record at the same time in the same directory.
    before = _recordings()
    _killed(RECORD)
    left = _recordings() - before
    assert left
    if by == "prune":
        run("prune")
    else:
        with record_timeline():
            pass
    wait_until(lambda: not left & _recordings())


def test_next_server_removes_files_of_a_killed_server_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    with scratch.private_directory(scratch.PREFIX) as running:
        _killed(SCRATCH)
        (killed,) = {*running.parent.glob("server-*")} - {running}
        with scratch.private_directory(scratch.PREFIX):
            assert running.exists() and not killed.exists()


def test_killed_start_of_a_template_leaves_no_file(home: Path) -> None:
    before = set(home.rglob("*"))
    _killed(SPAWN)
    assert not [path for path in set(home.rglob("*")) - before if path.is_file()]


def _draft(models: Path) -> Path:
    draft = models / f"tiny-v{tiny.GENERATION}" / ".draft-x"
    draft.mkdir(parents=True)
    (draft / "lock").touch()
    (draft / "model.safetensors").write_text("part")
    return draft


def test_draft_of_a_killed_build_is_removed_by_prune_but_not_a_running_one(run: Run, home: Path) -> None:
    draft = _draft(Cache.at().models)
    with files.hold_lock(draft / "lock"):
        run("prune")
        assert draft.is_dir()
    run("prune")
    assert not draft.exists()


def test_draft_of_killed_build_is_removed_by_next_build(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = _draft(home)
    monkeypatch.setattr(tiny, "_run_child", lambda name, target: (target / "config.json").write_text("{}"))
    tiny.build_tiny_model("tiny-llama", home)
    assert not draft.exists()


def test_prune_removes_work_of_killed_materialization_but_not_of_a_running_one(run: Run, home: Path) -> None:
    work = Cache.at().unfinished_materializations
    with create_workspace(work) as running:
        killed = work / "tmpkilled"
        killed.mkdir()
        (killed / "lock").touch()
        run("prune")
        assert running.is_dir() and not killed.exists()


@pytest.mark.parametrize("by", ["prune", "start"])
def test_killed_copy_of_compiled_code_is_removed(run: Run, home: Path, by: str) -> None:
    section = write_tree(home / "section", {"aot/kernel": b"code"})
    root = paths.compiled_dir() / ("a" * 64)
    root.parent.mkdir(parents=True)
    _killed(LAY, str(section), str(root))
    (draft,) = (path for path in root.parent.iterdir() if path.is_dir())
    if by == "prune":
        run("prune")
    else:
        assert (caches.copy_section(section, root) / "aot" / "kernel").read_bytes() == b"code"
    assert not draft.exists()


@pytest.mark.slow
def test_builder_of_a_tiny_model_ends_with_its_parent(home: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", BUILD, str(home / "models")])
    children: list[psutil.Process] = []
    while not children:
        children = psutil.Process(parent.pid).children()
    wait_until(lambda: "coldstart.models.tiny" in " ".join(children[0].cmdline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(children, 30)[1] == []
