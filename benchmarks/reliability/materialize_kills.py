"""A materialization killed at any step tears no bundle, and leaves nothing that neither the next one nor prune removes.

The materialization is the real one, forked from a prepared process. vLLM's processes and CRIU are stand-ins: processes
that write such files. It is killed by events: its own n-th system step (audit events of the file system and of
processes), or the n-th file that the engine writes. First one run counts the steps of each stage. After each kill every
bundle is intact, no process is left, and the next materialization succeeds. After each second kill `prune` runs before.

Run: python -m benchmarks reliability/materialize_kills [--publish 20] [--freeze 20] [--elsewhere 200] [--minutes 18]
Time: about 5 minutes
Result: materialize-kills.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from coldstart.artifacts.key import Key

from benchmarks.common import about, finish, parser
from benchmarks.reliability.kill_points import STEPS, killed, watch_steps
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import process_snapshot, pruning
from coldstart.materialize import assembly, freeze, progress
from coldstart.materialize.materialize import materialize
from coldstart.materialize.options import Options
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc.lifeline import SUPERVISOR_ENV
from coldstart.system.proc.scratch import PROOF, private_directory

PUBLISH, FREEZE, ELSEWHERE = "publish", freeze.STAGE, "elsewhere"
KEY = Key({"hardware.name": "cpu", "model.name": "tiny", "runtime.vllm": "0.32"})
# Marks the processes of this run, also those that outlive a kill.
MARK, WRITES, WITHIN_S = "COLDSTART_KILLS_RUN", 20, 20.0
_EVENTS = (*STEPS, "subprocess.Popen", "os.kill", "os.killpg", "os.posix_spawn", "os.fork")
# As real processes, stand-ins end with their parent, also if it was killed before they could request a signal.
_LIFELINE = f"""
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(os.environ.pop({str(SUPERVISOR_ENV)!r})):
    os._exit(1)
"""
# It writes sections and a temporary file, and may kill its parent.
_ENGINE = f"""{_LIFELINE}
import json, sys, tempfile
from pathlib import Path
out, at = Path(sys.argv[1]), int(os.environ.get("KILL_AT", "-1"))
sections = {{"kv": {{"bytes": 4096, "blocks": 7}}, "modelinfo": {{"canary": 1}}, "iterations": {{}}}}
(out / "compile").mkdir()
for number in range({WRITES}):
    if number == at:
        os.kill(os.getppid(), signal.SIGKILL)
    (out / "compile" / f"graph{{number}}.py").write_text("def f(): ...\\n" * 999)
    tempfile.mkstemp()
for name in ("kv", "modelinfo"):
    (out / f"{{name}}.json").write_text(json.dumps(sections[name]))
"""
_TEMPLATE = f"""{_LIFELINE}
import time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    print(flush=True)
    time.sleep(600)
os.wait()
"""


def _stand_in(name: str, out: Path) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", name, str(out)]


def _run_engine(self: assembly.Assembly, module: str, *_: object) -> None:
    assembly._run_child(
        _stand_in(_ENGINE, self.out), self.work / f"{module}.log", self.events(module), self._say
    )


def _start_proof(self: assembly.Assembly) -> dict[str, Any]:
    with private_directory(PROOF) as directory, (self.work / "proof.log").open("wb"):
        (directory / "socket").touch()
        return {"ready_s": 1.0, "memory_bytes": 1, "spans": [], "offline_spans": []}


def _spawn_template(*_: object, **__: object) -> subprocess.Popen[bytes]:
    env = os.environ | {str(SUPERVISOR_ENV): str(os.getpid())}
    process = subprocess.Popen(
        _stand_in(_TEMPLATE, Path()), env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    (process_snapshot.meeting_dir() / "socket").touch()
    return process


def _dump(*words: str) -> subprocess.CompletedProcess[bytes]:
    out = Path(words[words.index("-D") + 1])
    for number in range(5):
        (out / f"pages-{number}.img").write_bytes(os.urandom(1 << 16))
    return subprocess.CompletedProcess(words, 0)


def _fingerprint(pid: int, modules: Path, out: Path) -> None:
    del pid
    modules.touch()
    (out / "files.sha256").write_text("")


def _stand_for_processes(home: Path) -> None:
    """Replace vLLM's processes, CRIU and the directory of frozen files, which is the same for every run of this user."""
    frozen = home / "frozen"
    frozen.mkdir(mode=0o700)
    paths.frozen_dir = lambda: frozen
    assembly.Assembly._engine = _run_engine  # type: ignore[method-assign, assignment]
    assembly.Assembly._proof_start = _start_proof  # type: ignore[method-assign]
    process_snapshot.criu.missing = lambda: None
    process_snapshot.criu.version = lambda: "4.2"
    process_snapshot.criu.run = _dump  # type: ignore[assignment]
    process_snapshot.criu_memory.move = lambda out, _: (out / "memory.img").write_bytes(b"memory")  # type: ignore[assignment]
    process_snapshot.fingerprint.write = _fingerprint
    process_snapshot.template_pool.spawn = _spawn_template  # type: ignore[assignment]
    freeze.fetch.choose = lambda *_, **__: None  # type: ignore[assignment, return-value]
    freeze.prepare.prepare = lambda *_, **__: LaunchPlan(Arguments())  # type: ignore[assignment]


class Steps:
    """Count of the system steps of this process; before step number `last` it kills itself. `stages` begin at steps."""

    def __init__(self, last: int = 0) -> None:
        self.count, self.last = 0, last
        self.stages: list[tuple[str, int]] = []
        watch_steps(self._step, _EVENTS)

    def _step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def phase(self, name: str, expected_s: float | None = None) -> Iterator[progress.Steps]:
        """Record the begin of a stage."""
        del expected_s
        self.stages.append((name, self.count))
        yield progress.silent


class World:
    """One cache with a first bundle, and everything that a materialization may leave behind."""

    def __init__(self, home: Path) -> None:
        self.home, self.cache = home, Cache.at(home / "cache")
        model = home / "tiny"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (model / "tokenizer.json").write_text("{}")
        head = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + os.urandom(4096))
        self.model = ResolvedModel("tiny", model, None, None, {})

    def materialize(self, phase: Any = progress.no_progress) -> None:
        lookup = Lookup(self.model, Arguments(()), self.cache, KEY).refresh()
        materialize(lookup, Options(snapshot=True, force=True), phase)

    def count(self) -> list[tuple[str, int]]:
        """Return where each stage of one run begins, and the number of its last step."""
        file = self.home / "stages.json"

        def work() -> None:
            steps = Steps()
            self.materialize(steps.phase)
            counted = [*steps.stages, ("end", steps.count)]
            file.write_text(json.dumps(counted))

        assert killed(work) == 0
        return [(str(name), int(step)) for name, step in json.loads(file.read_text())]

    def left(self) -> list[str]:
        """Return all files and directories that belong to no bundle and to no running process."""
        store = Lookup(self.model, Arguments(()), self.cache, KEY).store
        meeting = self.home / "frozen" / "meeting"
        places = [self.cache.work, store.layout.staging, paths.temporary_dir(), paths.runtime_dir(), meeting]
        # It contains the temporary directory of the user.
        places.append(self.home / "tmp")
        found = [path for place in places if place.is_dir() for path in place.iterdir()]
        kept = (paths.temporary_dir(), paths.runtime_dir())
        return [str(path.relative_to(self.home)) for path in found if not _is_lock(path) and path not in kept]

    def find_processes(self) -> list[str]:
        """Return the processes of this run that live, without this one."""
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                marked = one.pid != os.getpid() and one.environ().get(MARK) == str(self.home)
                if marked and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"process {one.pid}: {' '.join(one.cmdline())[:60]}")
        return found

    def check(self, before: set[str]) -> set[str]:
        """Check that every bundle is whole and that none is lost; return their digests."""
        bundles = Lookup(self.model, Arguments(()), self.cache, KEY).store.list()
        for bundle in bundles:
            faults = bundle.verify("checksum")
            assert not faults, f"{bundle.ref} is torn: {faults}"
        now = {bundle.digest for bundle in bundles}
        assert before <= now, "a bundle is gone"
        return now


def _is_lock(path: Path) -> bool:
    return path.name == "lock" or path.suffix == ".lock"


def _wait_for_end(world: World) -> None:
    end_s = time.monotonic() + WITHIN_S
    while (alive := world.find_processes()) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not alive, f"left behind: {alive}"


def strike(world: World, work: Callable[[], None], number: int, counts: Counter[str]) -> bool:
    """Kill one materialization, check, clean up and check; return whether the kill hit. Raises AssertionError."""
    before = world.check(set())
    status = killed(work)
    assert status in (0, -signal.SIGKILL), f"the materialization itself failed with {status}"
    _wait_for_end(world)
    world.check(before)
    counts["kills that left something"] += bool(world.left())
    if number % 2:
        pruning.prune(world.cache)
        counts["something left after prune"] += bool(world.left())
    world.materialize()
    counts["something left after the next run"] += bool(left := world.left())
    if left:
        pruning.prune(world.cache)
        left = world.left()
        assert not left, f"left behind after the next run and prune: {left}"
    world.check(set())
    pruning.prune(world.cache)
    return status == -signal.SIGKILL


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` steps from `first` to `last`, evenly; steps repeat if there are fewer."""
    return [first + round(number * (last - first) / max(1, count - 1)) for number in range(count)]


def plan_kills(stages: list[tuple[str, int]], given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the kills as stage and step; those "elsewhere" are of the other stages, and a quarter is of the engine's files."""
    begins = dict(stages)
    publish, frozen, end = begins[PUBLISH], begins[FREEZE], begins["end"]
    engine = given.elsewhere // 4
    kills = [(PUBLISH, step) for step in _spread(publish + 1, frozen, given.publish)]
    kills += [(FREEZE, step) for step in _spread(frozen + 1, end, given.freeze)]
    kills += [(ELSEWHERE, step) for step in _spread(1, publish, given.elsewhere - engine)]
    return kills + [("engine", number % WRITES) for number in range(engine)]


def _work(world: World, stage: str, step: int) -> Callable[[], None]:
    def run() -> None:
        if stage == "engine":
            os.environ["KILL_AT"] = str(step)
            world.materialize()
        else:
            steps = Steps(step)
            world.materialize(steps.phase)

    return run


def main() -> None:
    """Parse the arguments, run the kills, and store the result."""
    arguments = parser(__doc__)
    for name, count in (("publish", 20), ("freeze", 20), ("elsewhere", 200)):
        arguments.add_argument(f"--{name}", type=int, default=count, help="number of kills")
    arguments.add_argument("--minutes", type=float, default=18, help="stop after this time")
    given = arguments.parse_args()
    began, findings = time.monotonic(), list[str]()
    made, counts = Counter[str](), Counter[str]()
    # A killed process leaves its children to this one, which must reap them.
    ctypes.CDLL(None).prctl(36, 1)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="kills-", dir=memory if memory.is_dir() else None) as name:
        home = Path(name)
        for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
            os.environ[variable] = name
        os.environ["XDG_RUNTIME_DIR"] = str(home / "run")
        (home / "tmp").mkdir(mode=0o700)
        os.environ["TMPDIR"] = tempfile.tempdir = str(home / "tmp")
        os.environ[MARK] = name
        _stand_for_processes(home)
        world = World(home)
        world.materialize()
        pruning.prune(world.cache)
        stages = world.count()
        pruning.prune(world.cache)
        for number, (stage, planned) in enumerate(plan_kills(stages, given)):
            step = planned
            if time.monotonic() - began > 60 * given.minutes:
                break
            try:
                # A run has a few steps less than another: a kill beyond its end is made earlier.
                while not strike(world, _work(world, stage, step), number, counts):
                    counts["runs that ended before their kill"] += 1
                    step -= 10
            except Exception as error:  # noqa: BLE001 - any error is a finding
                findings.append(f"{stage}, step {step}: {type(error).__name__}: {error}"[:300])
            else:
                made[stage] += 1
    result = about() | {"kills": dict(made), "counts": dict(counts), "stages": dict(stages)}
    result |= {"seconds": round(time.monotonic() - began, 1), "found": len(findings)}
    finish("materialize-kills", result | {"findings": findings[:50]})
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
