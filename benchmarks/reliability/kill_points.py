"""A process killed at any step of a store operation tears no bundle, and the same operation then succeeds.

Simulated: a forked process kills itself before its n-th system step (audit events of the file system, and fsync), for n = 1, 2,
... until the operation completes. Random: a forked process is killed from outside at a random moment. After every kill each
bundle is intact, what was published before exists, and the operation succeeds when repeated; prune leaves no staging.

Run: python -m benchmarks reliability/kill_points [--points 10000] [--minutes 4] [--random 200]
Time: about 4 minutes
Result: kill-points.json
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from coldstart.artifacts import sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource
from coldstart.artifacts.key import Key
from coldstart.artifacts.manifest import Provenance
from coldstart.artifacts.store import Store

from benchmarks.common import about, finish, parser
from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.trust import unpacked

KV = {"blocks": 7, "bytes_per_block": 4096.5}
CODE = {"kernel.so": b"\x7fELF" + bytes(64), "cache/graph.py": b"def f(): ...\n"}
KEY = Key({"hardware.name": "cpu", "model.name": "tiny", "runtime.vllm": "0.32"})
MADE = Provenance("2026-01-02T03:04:05Z", {"coldstart": "0.1.0"}, ("materialize",), {}, "org/tiny")
STEPS = (
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod"),
    *("os.truncate", "os.scandir", "fcntl.flock", "shutil.rmtree"),
)


def _write_tree(directory: Path) -> None:
    for name, data in CODE.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class World:
    """Store with a bundle, remote store and unpack directory; `act` runs an operation, `check` verifies the result."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.other = root, Store(root / "store"), Store(root / "other")
        _write_tree(root / "tree")
        self.run = 0
        self.first = self.publish(self.store)
        self.theirs = self.publish(self.other)

    def publish(self, store: Store) -> Bundle:
        self.run += 1
        with store.begin(KEY) as draft:
            draft.add_json("kv", KV | {"run": self.run, "process": os.getpid()})
            draft.add_tree("compile", self.root / "tree")
            return draft.publish(MADE, signer=sign.host_key(paths.state_dir()))

    def pull(self) -> Bundle:
        return self.store.receive(LayoutSource(self.other.layout), self.theirs.descriptor)

    def prune(self) -> object:
        return self.store.prune(keep=1, trust=inspection.trust)

    def unpack(self) -> Path:
        bundle = self.store.get("org/tiny", trust=inspection.trust)
        return unpacked.unpacked(bundle, "compile", self.root / "unpacked", inspection.trust)

    def pull_again(self) -> object:
        self.store.receive(LayoutSource(self.other.layout), self.first.descriptor)
        return self.first.verify("checksum")

    operations = ("publish", "pull", "prune", "unpack", "pull_again")

    def prepare(self, operation: str) -> None:
        """Create the input of an operation."""
        if operation == "prune":
            self.publish(self.store)
        if operation == "pull":
            self.publish(self.store)
            self.store.prune(drop=[b for b in self.store.list() if b.digest == self.theirs.digest])
        if operation == "unpack":
            shutil.rmtree(self.root / "unpacked", ignore_errors=True)
        if operation == "pull_again":
            self.first = self.store.get("org/tiny", trust=inspection.trust)
            self.other.receive(LayoutSource(self.store.layout), self.first.descriptor)
            path = blob_path(self.store.root, self.first.entry("compile").digest)
            path.write_bytes(b"?" + path.read_bytes()[1:])

    def act(self, operation: str) -> None:
        """Run the operation once; raise if it fails."""
        if operation == "publish":
            self.publish(self.store)
        elif operation == "unpack":
            place = self.unpack()
            found = {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
            assert found == CODE, f"unpacked {sorted(found)}"
        elif operation == "pull_again":
            assert self.pull_again() == []
        else:
            getattr(self, operation)()

    def check(self, operation: str, before: set[str]) -> None:
        """Check that all bundles are complete and that only a prune has removed any."""
        bundles = self.store.list()
        for bundle in bundles:
            faults = bundle.verify("checksum")
            assert not faults or (operation == "pull_again" and bundle == self.first), (
                f"{bundle.ref}: {faults}"
            )
        assert operation == "prune" or before <= {bundle.digest for bundle in bundles}, "a bundle is gone"
        assert bundles, "the store is empty"


def killed(work: Callable[[], None], watch: Callable[[int], None] | None = None) -> int:
    """Run `work` in a forked process and return its exit status; call `watch` with its pid."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - reported to the parent by the exit code
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
    if watch is not None:
        watch(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying(step: int, work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` that kills its process before step number `step`."""

    def run() -> None:
        left = step

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        watch_steps(count)
        work()

    return run


def watch_steps(count: Callable[[], None], events: Collection[str] = STEPS) -> None:
    """Call `count` before each of these audit events and each fsync of this process, from now on."""
    sync = os.fsync
    os.fsync = lambda handle: (count(), sync(handle))[1]  # type: ignore[assignment, func-returns-value]
    sys.addaudithook(lambda event, _: count() if event in events else None)


def one(world: World, operation: str, kill: Callable[[World], int], findings: list[str]) -> int:
    """Prepare, kill, check, repeat and check; return the status of the killed child."""
    world.prepare(operation)
    world.run += 1  # child and parent publish different bundles
    before = {bundle.digest for bundle in world.store.list()}
    status = kill(world)
    try:
        assert status in (0, -signal.SIGKILL), f"the operation itself failed with {status}"
        world.check(operation, before)
        world.act(operation)
        if world.run % 10 == 0:
            world.check(operation, before)
            world.store.prune(keep=1, trust=inspection.trust)
            assert list(world.store.layout.staging.iterdir()) == [], "staging is left"
    except Exception as error:  # noqa: BLE001 - any error is a finding
        findings.append(f"{operation}: {type(error).__name__}: {error}"[:300])
    return status


def simulated(world: World, points: int, deadline_s: float, findings: list[str]) -> dict[str, Any]:
    """Kill at every step of every operation in turn, until `points` kills have been made."""
    made, steps = Counter[str](), dict[str, int]()
    while sum(made.values()) < points and time.monotonic() < deadline_s:
        for operation in World.operations:
            for step in range(1, 10_000):
                status = one(
                    world,
                    operation,
                    lambda w, o=operation, n=step: killed(dying(n, lambda: w.act(o))),  # type: ignore[misc]
                    findings,
                )
                if status != -signal.SIGKILL:
                    steps[operation] = step - 1
                    break
                made[operation] += 1
                if sum(made.values()) >= points or time.monotonic() > deadline_s:
                    break
    return {"points": sum(made.values()), "by operation": dict(made), "steps of one": steps}


def kill_at_random(world: World, count: int, deadline_s: float, findings: list[str]) -> dict[str, Any]:
    """Kill each operation from outside at random times."""
    chance, hit, made = random.Random(11), Counter[str](), Counter[str]()
    for operation in World.operations:
        world.prepare(operation)
        began = time.monotonic()
        killed(lambda o=operation: world.act(o))  # type: ignore[misc]
        long_s = time.monotonic() - began
        for _ in range(count):
            if time.monotonic() > deadline_s:
                break

            def strike(pid: int, after_s: float = chance.uniform(0, long_s)) -> None:
                time.sleep(after_s)
                os.kill(pid, signal.SIGKILL)  # not yet reaped: the number is its own

            status = one(
                world,
                operation,
                lambda w, o=operation, s=strike: killed(lambda: w.act(o), s),  # type: ignore[misc]
                findings,
            )
            made[operation] += 1
            hit[operation] += status == -signal.SIGKILL
    return {"kills": dict(made), "that hit": dict(hit)}


def main() -> None:
    """Parse the arguments, run the kills, and store the result."""
    arguments = parser(__doc__)
    arguments.add_argument("--points", type=int, default=10_000)
    arguments.add_argument("--random", type=int, default=200, help="number of random kills of each operation")
    arguments.add_argument(
        "--minutes", type=float, default=60, help="stop after this time with the results so far"
    )
    given = arguments.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        home = Path(name)
        for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            os.environ[variable] = name
        world, findings, began = World(home), list[str](), time.monotonic()
        deadline_s = began + 60 * given.minutes
        result: dict[str, Any] = {"random": kill_at_random(world, given.random, deadline_s, findings)}
        result["simulated"] = simulated(world, given.points, deadline_s, findings)
    result |= {"seconds": round(time.monotonic() - began, 1), "found": len(findings)}
    finish("kill-points", about() | result | {"findings": findings[:50]})
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
