"""Files and processes of killed commands: the next one of their kind, or prune, removes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from coldstart.artifacts import files
from support.waiting import wait_until
from tools.bundles import write_tree
from tools.shell import Run

from coldstart.launch import caches
from coldstart.materialize.materialize import workspace
from coldstart.models import tiny
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.recording import record_timeline

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
template_pool.spawn("runtime", LaunchPlan([]), Path("socket"), -3, 20)
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
tiny.build("tiny-llama", Path(sys.argv[1]))
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


def test_draft_of_a_killed_build_is_removed_by_the_next_build(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = _draft(home)
    monkeypatch.setattr(tiny, "_run_child", lambda name, target: (target / "config.json").write_text("{}"))
    tiny.build("tiny-llama", home)
    assert not draft.exists()


def test_prune_removes_the_work_of_a_killed_materialization_but_not_of_a_running_one(
    run: Run, home: Path
) -> None:
    work = Cache.at().unfinished
    with workspace(work) as running:
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
