"""`kill -9` at random moments, of the command and of the process that it started."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store

from benchmarks.reliability.left import settled, there
from benchmarks.reliability.litter import cycle
from benchmarks.reliability.run import VLLM, Run

STOP, NOTHING_LEFT = ("template", "stop"), "No template runs."
WHOLE_EVERY = 20  # kills, between two whole starts
TEMPLATE, PREFETCH = (
    ("template", "start", "tiny-llama", "--level", "runtime"),
    ("prefetch", "start", "tiny-llama"),
)


@dataclass(frozen=True)
class Kind:
    """A command that is killed within `long_s`, what must be so before, and what must succeed afterwards.

    `daemon` is a word of the command line of a process that outlives the command: killed too, every second time.
    """

    words: tuple[str, ...]
    long_s: float
    before: Callable[[], object] = tuple
    after: tuple[tuple[str, ...], ...] = ()
    daemon: str | None = None


def kills(run: Run, count: int) -> None:
    """Afterwards the store is whole and the next start is planned, now and then done."""
    run.command("materialize", "tiny-llama", "--", *VLLM)
    cache = run.machine.cache
    store, other = Store(cache / "bundles"), run.machine.root / "other"
    if not other.exists():
        shutil.copytree(store.root, other)
    (bundle,) = [b for b in Store(other).list() if b.version == 1][:1]
    before = there(run)
    for number in range(count):
        if run.over:
            break
        name, kind = list(_kinds(run, bundle, f"{other}@{bundle.digest}").items())[number % 6]
        kind.before()
        _killed(run, name, kind, also_daemon=number // 6 % 2 == 1)
        for words in kind.after:
            again = run.command(*words)
            if again.returncode and not (words[:2] == STOP and NOTHING_LEFT in again.stdout):
                run.fail(f"{words} after {name} was killed: {again.stdout[-300:]}")
        run.counts[name] += 1
        for one in store.list():
            if faults := one.verify("checksum"):
                run.fail(f"after {name}: {one.ref}: {faults[:2]}")
        planned = run.command("serve", "tiny-llama", "--dry-run", "--format", "json", "--", *VLLM)
        if planned.returncode or '"compile_dir": null' in planned.stdout:
            run.fail(f"after {name}: no plan: {planned.stdout[-300:]}")
        if number % WHOLE_EVERY == WHOLE_EVERY - 1:
            cycle(run, "fresh")
            run.counts["whole starts after"] += 1
    run.command("prune")
    now = settled(run, {"files": there(run)["files"]})
    if left := [name for name in now["processes"] if "coldstart" in name]:
        run.fail(f"processes at the end: {left}")
    if left := set(now["shared memory"]) - set(before["shared memory"]):
        run.fail(f"shared memory at the end: {sorted(left)}")


def _kinds(run: Run, bundle: Bundle, elsewhere: str) -> dict[str, Kind]:
    """Each leaves the bundle in the store."""
    unpacked = run.machine.cache / "unpacked"
    weights = str(next((run.machine.cache / "models").glob("*/tiny-llama")))
    pull, prune = ("pull", elsewhere), ("prune", bundle.ref)
    return {
        "pull": Kind(pull, 1.5, lambda: run.command(*prune), (pull,)),
        "unpack and start": Kind(
            ("serve", "tiny-llama", "--", *VLLM), 6.0, lambda: shutil.rmtree(unpacked, ignore_errors=True)
        ),
        "materialize": Kind(("materialize", "tiny-llama", "--force", "--", *VLLM), 12.0),
        "template start": Kind(
            (*TEMPLATE, "--", *VLLM),
            6.0,
            after=(("template", "stop", "--force"),),
            daemon="coldstart.vllm.engine.template",
        ),
        "prune": Kind(prune, 1.0, lambda: run.command(*pull), (pull,)),
        "prefetch": Kind(
            (*PREFETCH, "--weights-from", weights),
            2.0,
            after=((*PREFETCH, "--weights-from", weights), ("prefetch", "stop")),
            daemon="coldstart.weights.prefetch",
        ),
    }


def _killed(run: Run, name: str, kind: Kind, *, also_daemon: bool) -> None:
    with (run.machine.root / "said").open("wb") as said:
        process = run.machine.start(*kind.words, stdout=said, stderr=said, start_new_session=True)
        time.sleep(run.chance.uniform(0, kind.long_s))
        run.counts[f"{name}: ended before"] += process.poll() is not None
        process.kill()
        process.wait()
    if kind.daemon and also_daemon:
        for one in psutil.process_iter(["cmdline"]):
            if any(kind.daemon in word for word in one.info["cmdline"] or ()):
                one.kill()
                run.counts[f"{name}: its process killed"] += 1
