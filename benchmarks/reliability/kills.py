"""`kill -9` at random moments, of the command and of the process that it started."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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

    Without `long_s` it is what the command takes by itself, measured once. `daemon` is a word of the command line of a
    process that outlives the command: killed too, every second time.
    """

    words: tuple[str, ...]
    long_s: float | None = None
    before: Callable[[], object] = tuple
    after: tuple[tuple[str, ...], ...] = ()
    daemon: str | None = None


def kills(run: Run, count: int) -> None:
    """`count` of each kind. Afterwards the store is whole and the next start is planned, now and then done."""
    run.command("materialize", "tiny-llama", "--", *VLLM)
    cache = run.machine.cache
    store, other = Store(cache / "bundles"), run.machine.root / "other"
    if not other.exists():
        shutil.copytree(store.root, other)
    (bundle,) = [b for b in Store(other).list() if b.version == 1][:1]
    kinds = {
        name: kind if kind.long_s else replace(kind, long_s=_lasts(run, kind))
        for name, kind in _kinds(run, bundle, f"{other}@{bundle.digest}").items()
    }
    before = there(run)
    for number in range(1 << 30):
        name = min(kinds, key=lambda one: run.counts[one])
        if run.over or run.counts[name] >= count:
            break
        kind = kinds[name]
        kind.before()
        hit = _killed(run, name, kind, also_daemon=run.counts[name] % 2 == 1)
        for words in kind.after:
            again = run.command(*words)
            if again.returncode and not (words[:2] == STOP and NOTHING_LEFT in again.stdout):
                run.fail(f"{words} after {name} was killed: {again.stdout[-300:]}")
        run.counts[name if hit else f"{name}: had ended"] += 1
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
        "pull": Kind(pull, None, lambda: run.command(*prune), (pull,)),
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
        "prune": Kind(prune, None, lambda: run.command(*pull), (pull,)),
        "prefetch": Kind(
            (*PREFETCH, "--weights-from", weights),
            after=((*PREFETCH, "--weights-from", weights), ("prefetch", "stop")),
            daemon="coldstart.weights.prefetch",
        ),
    }


def _lasts(run: Run, kind: Kind) -> float:
    """Seconds of the command when nobody kills it; what is to be done after it is done."""
    kind.before()
    began = time.monotonic()
    run.command(*kind.words)
    took_s = time.monotonic() - began
    for words in kind.after:
        run.command(*words)
    return took_s


def _killed(run: Run, name: str, kind: Kind, *, also_daemon: bool) -> bool:
    """Whether it still ran when it was killed."""
    with (run.machine.root / "said").open("wb") as said:
        process = run.machine.start(*kind.words, stdout=said, stderr=said, start_new_session=True)
        time.sleep(run.chance.uniform(0, kind.long_s or 0.0))
        hit = process.poll() is None
        process.kill()
        process.wait()
    if kind.daemon and also_daemon:
        for one in psutil.process_iter(["cmdline"]):
            if any(kind.daemon in word for word in one.info["cmdline"] or ()):
                one.kill()
                run.counts[f"{name}: its process killed"] += 1
    return hit
