"""Real starts and stops by the hundred: nothing is left behind, nothing hostile stops a start, no kill tears anything.

    python benchmarks/reliability.py litter|hostile|kills [--count N] [--minutes M] [--more] --home DIRECTORY

Everything runs in namespaces of its own (processes, /dev/shm, /tmp, /var/tmp), so whatever is there at the end was left by it.
`--home` keeps the materialized bundle between runs; `--more` adds to the result that is there. Needs root.

litter: start and stop by every mode, refused and killed ones too. After one warm-up of each kind, no process, open
descriptor, shared segment, file or socket may be more than after it.
hostile: plain sections mutated (tests/tools/fuzzed.py), of a bundle that nobody trusted has signed, taken with --untrusted.
Each start must come up and answer, write nothing to vLLM's cache, and call nothing verified.
kills: `kill -9` of materialize, pull, serve and template start at a random moment. The store must be whole, and the next
serve plan.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from coldstart.artifacts.store import Store  # noqa: E402
from tools import fuzzed  # noqa: E402
from tools.machine import Machine  # noqa: E402

from benchmarks.common import RESULTS, finish  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.measure.bench.completions import CompletionClient  # noqa: E402
from coldstart.measure.bench.launch import HOST, free_port  # noqa: E402

VLLM = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "268435456")
EAGER = ("--max-model-len", "1024", "--enforce-eager")
READY_S = 120.0
INSIDE = "COLDSTART_RELIABILITY_INSIDE"


@dataclass
class Run:
    """One user, the results so far, and when to stop."""

    machine: Machine
    deadline_s: float
    chance: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline_s

    def fail(self, what: str) -> None:
        """A finding."""
        self.findings.append(what[:600])

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, whatever its code."""
        with (self.machine.root / "said").open("w+") as said:
            process = self.machine.start(*words, stdout=said, stderr=said)
            code = process.wait(timeout=600)
            said.seek(0)
            return subprocess.CompletedProcess(words, code, said.read(), "")


@dataclass
class Started:
    """A `coldstart serve` under way."""

    process: subprocess.Popen[bytes]
    ready: Path
    log: Path
    port: int

    def await_ready(self) -> dict[str, Any] | None:
        """The ready file, None where the command ended without; what takes too long is killed."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.ready.exists():
                return dict(json.loads(self.ready.read_text()))
            if self.process.poll() is not None:
                return None
            time.sleep(0.02)
        self.process.kill()
        return None

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(timeout=90)


@contextlib.contextmanager
def serving(run: Run, model: str, *options: str, vllm: tuple[str, ...] = VLLM) -> Iterator[Started]:
    """`coldstart serve`, killed at the end of the block where it still runs; its files go."""
    place = run.machine.root / "served"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    port = free_port()
    words = ["serve", model, "--port", str(port), "--ready-file", str(place / "ready.json"), *options]
    with (place / "log").open("wb") as log:
        process = run.machine.start(*words, "--", *vllm, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Started(process, place / "ready.json", place / "log", port)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    return " | ".join(log.read_text(errors="replace").splitlines()[-6:])[-400:]


# ---- litter


def litter(run: Run, count: int) -> None:
    """Cycles of every kind in turn; what is there after the first of each is what may be there at the end."""
    run.command("materialize", "tiny-llama", "--", *VLLM)
    model = next((run.machine.cache / "models").glob("*/tiny-llama"))
    kinds = [
        ("template-engine", lambda: _cycle(run, "template-engine")),
        ("template-engine, command killed", lambda: _cycle(run, "template-engine", number=signal.SIGKILL)),
        ("template-engine, server killed", lambda: _cycle(run, "template-engine", server=True)),
        ("killed while it starts", lambda: _cycle(run, "auto", after_s=run.chance.uniform(0.1, 3))),
        ("interrupted while it starts", lambda: _cycle(run, "auto", number=signal.SIGINT, after_s=1.0)),
        ("fresh", lambda: _cycle(run, "fresh")),
        ("fresh, command killed", lambda: _cycle(run, "fresh", number=signal.SIGKILL)),
        ("weights fetched", lambda: _cycle(run, "auto", "--weights-from", str(model))),
        ("refused: no bundle", lambda: _refused(run, 3, ("--max-model-len", "77"))),
        (
            "refused: vLLM takes no such flag",
            lambda: _refused(run, 1, (*VLLM, "--seed", "x"), "--on-miss=warn"),
        ),
        ("stepped down: no snapshot", lambda: _cycle(run, "snapshot")),
        ("template started and stopped", lambda: _templates(run)),
    ]
    started = run.command("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)
    if started.returncode:
        raise SystemExit(started.stdout[-2000:])
    for _, cycle in kinds:
        cycle()
    before = _there(run)
    for number in range(count):
        if run.over:
            break
        name, cycle = kinds[number % len(kinds)]
        cycle()
        run.counts[name] += 1
        if (more := _more(before, _settled(run, before))) is not None:
            run.fail(f"after {name}: {more}")
            before = _there(run)
    run.command("template", "stop")
    run.command("prefetch", "stop")
    left = {
        name: value for name, value in _settled(run, {}).items() if name in ("processes", "shared memory")
    }
    if any(left.values()):
        run.fail(f"at the end: {left}")


def _cycle(
    run: Run,
    mode: str,
    *options: str,
    number: int = signal.SIGTERM,
    after_s: float | None = None,
    server: bool = False,
) -> None:
    with serving(run, "tiny-llama", "--mode", mode, *options) as one:
        if after_s is not None:
            time.sleep(after_s)
            one.end(signal.SIGKILL if number == signal.SIGTERM else number)
            return
        report = one.await_ready()
        if report is None:
            run.fail(f"{mode} {options}: no server: {tail(one.log)}")
            return
        if server:
            os.kill(report["pid"], signal.SIGKILL)
            one.process.wait(timeout=60)
        else:
            one.end(number)


def _refused(run: Run, code: int, vllm: tuple[str, ...], *options: str) -> None:
    done = run.command("serve", "tiny-llama", *options, "--", *vllm)
    if done.returncode != code or "Traceback" in done.stdout.partition("(")[0]:
        run.fail(f"refused with {done.returncode}, not {code}: {done.stdout[-300:]}")


def _templates(run: Run) -> None:
    for words in (("start", "tiny-llama", "--level", "runtime"), ("stop", "--level", "runtime")):
        done = run.command("template", *words, *(("--", *VLLM) if words[0] == "start" else ()))
        if done.returncode:
            run.fail(f"template {words}: {done.stdout[-300:]}")


def _there(run: Run) -> dict[str, Any]:
    """What could be left: processes, the template's descriptors, shared memory, files and sockets anywhere."""
    processes, descriptors = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if int(place.name) in (1, os.getpid(), os.getppid()) or not words[0]:
                continue  # the first process of the namespace reaps what nobody else does
            named = b" ".join(words[2:4]).decode(errors="replace") or place.name
            processes[int(place.name)] = named
            descriptors[int(place.name)] = len(list((place / "fd").iterdir()))
    places = (Path("/tmp"), Path("/var/tmp"), run.machine.root)
    apart = (run.machine.root / "served", run.machine.root / "said")
    files = {
        str(path)
        for place in places
        for path in place.rglob("*")
        if not path.is_relative_to(apart[0]) and path != apart[1] and "__pycache__" not in path.parts
    }
    return {
        "processes": sorted(processes.values()),
        "descriptors": sum(descriptors.values()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
        "files": files,
    }


def _settled(run: Run, before: dict[str, Any]) -> dict[str, Any]:
    """As `_there`, once what is ending has ended."""
    deadline = time.monotonic() + 15
    while True:
        now = _there(run)
        if _more(before, now) is None or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def _more(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What there is now that there was not."""
    for name in ("processes", "shared memory"):
        if more := Counter(now[name]) - Counter(before.get(name, [])):
            return f"{name}: {dict(more)}"
    if more := now["files"] - before.get("files", set()):
        return f"files: {sorted(more)[:8]}"
    if now["descriptors"] > before.get("descriptors", 0):
        return f"descriptors: {before.get('descriptors')} became {now['descriptors']}"
    return None


# ---- hostile


def hostile(run: Run, count: int) -> None:
    """Starts from bundles of a stranger's whose plain sections were mutated, by both kinds of template."""
    run.command("template", "start", "tiny-llama", "--level", "runtime", "--", *VLLM)
    plain = run.command("serve", "tiny-llama", "--on-miss", "warn", "--dry-run", "--", *EAGER)
    if plain.returncode:
        raise SystemExit(plain.stdout[-2000:])
    for name, value in run.machine.environment().items():
        os.environ[name] = value
    from coldstart.key import inspection
    from coldstart.machine.paths import Cache

    cache = Cache(run.machine.cache)
    found = inspection.look_up("tiny-llama", EAGER, cache=cache)
    shutil.copytree(cache.bundles, run.machine.root / "bundles", dirs_exist_ok=True)
    first = int(run.counts["seed"]) or 1
    for seed in range(first, first + count):
        if run.over:
            break
        chance = random.Random(seed)
        target = list(fuzzed.PLAIN)[seed % len(fuzzed.PLAIN)]
        shutil.rmtree(cache.bundles)
        store = Store(cache.bundles)
        value = fuzzed.mutated(copy.deepcopy(fuzzed.PLAIN[target]), chance, chance.choice([1, 1, 2, 5]))
        if target == "kv" and chance.random() < 0.5:  # well-formed, and wrong
            value = {
                "bytes": chance.choice([1, 4096, 1 << 40, 1 << 62, 2**63]),
                "blocks": 1,
                "block_tokens": 16,
            }
        if not _publish(store, found.key, target, value, run):
            continue
        before = _shared(cache.root)
        _hostile_start(run, seed, target, value)
        if more := _shared(cache.root) - before:
            run.fail(f"{seed} {target}: written to a shared cache: {sorted(more)[:5]}")
        run.counts["seed"] = seed + 1
    shutil.rmtree(cache.bundles)
    shutil.copytree(run.machine.root / "bundles", cache.bundles)
    run.command("template", "stop", "--force")


def _publish(store: Store, key: Any, target: str, value: Any, run: Run) -> bool:
    from coldstart.artifacts.errors import BundleError
    from tools.bundles import provenance

    try:
        with store.begin(key) as draft:
            for name, plain in fuzzed.PLAIN.items():
                draft.add_json(name, value if name == target else plain)
            draft.publish(provenance("tiny-llama"))
    except (BundleError, ValueError, UnicodeError, OverflowError):
        run.counts["no such bundle can be written"] += 1
        return False
    return True


def _shared(root: Path) -> set[str]:
    """What vLLM would believe later."""
    return {str(path.relative_to(root)) for path in root.glob("vllm/*/modelinfos/*")} | {
        str(path.relative_to(root)) for path in root.glob("unpacked/*")
    }


def _hostile_start(run: Run, seed: int, target: str, value: Any) -> None:
    with serving(run, "tiny-llama", "--untrusted", "--mode", "auto", vllm=EAGER) as one:
        report = one.await_ready()
        log = one.log.read_text(errors="replace")
        if report is None:
            run.fail(f"{seed} {target} {json.dumps(value)[:120]}: no server: {tail(one.log)}")
            return
        try:
            CompletionClient(HOST, one.port).complete("Once upon a time", 4)
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            run.fail(f"{seed} {target}: it does not answer: {error}")
        if "verified" in json.dumps(report) or "is not trusted" not in log:
            run.fail(f"{seed} {target}: taken for more than a stranger's: {json.dumps(report)[:200]}")
        run.counts[f"ready: {target}"] += 1
        run.counts[f"mode {report['mode']}"] += 1
        run.counts["left out after a death"] += any(
            "left out" in step["reason"] for step in report["fallbacks"]
        )
        one.end()


# ---- kills


def kills(run: Run, count: int) -> None:
    """`kill -9` at random moments; afterwards the store is whole and the next start is planned, now and then done."""
    run.command("materialize", "tiny-llama", "--", *VLLM)
    store = Store(run.machine.cache / "bundles")
    other = run.machine.root / "other"
    if not other.exists():
        shutil.copytree(store.root, other)
    (bundle,) = [b for b in Store(other).list() if b.version == 1][:1]
    kinds = {
        "pull": (("pull", f"{other}@{bundle.digest}"), 1.5),
        "unpack and start": (("serve", "tiny-llama", "--", *VLLM), 6.0),
        "materialize": (("materialize", "tiny-llama", "--force", "--", *VLLM), 12.0),
        "template start": (("template", "start", "tiny-llama", "--level", "runtime", "--", *VLLM), 6.0),
    }
    for number in range(count):
        if run.over:
            break
        name = list(kinds)[number % len(kinds)]
        words, long_s = kinds[name]
        if name == "pull":
            run.command("prune", bundle.ref)
        if name == "unpack and start":
            shutil.rmtree(run.machine.cache / "unpacked", ignore_errors=True)
        with (run.machine.root / "said").open("wb") as said:
            process = run.machine.start(*words, stdout=said, stderr=said, start_new_session=True)
            time.sleep(run.chance.uniform(0, long_s))
            run.counts[f"{name}: ended before"] += process.poll() is not None
            process.kill()
            process.wait()
        if name == "pull":
            again = run.command(*words)
            if again.returncode:
                run.fail(f"pull after a kill: {again.stdout[-300:]}")
        if name == "template start":
            run.command("template", "stop", "--force")
        run.counts[name] += 1
        for one in store.list():
            if faults := one.verify("checksum"):
                run.fail(f"after {name}: {one.ref}: {faults[:2]}")
        planned = run.command("serve", "tiny-llama", "--dry-run", "--format", "json", "--", *VLLM)
        if planned.returncode or '"compile_dir": null' in planned.stdout:
            run.fail(f"after {name}: no plan: {planned.stdout[-300:]}")
        if number % 20 == 19:
            _cycle(run, "fresh")
            run.counts["whole starts after"] += 1
    left = [
        name for name in _settled(run, {"files": _there(run)["files"]})["processes"] if "coldstart" in name
    ]
    if left:
        run.fail(f"processes at the end: {left}")


def main() -> None:
    """Parse, go inside, run, keep the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("litter", "hostile", "kills"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--home", type=Path, required=True)
    given = parser.parse_args()
    if INSIDE not in os.environ:
        inside = (
            'for d in /dev/shm /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs $d; done; "$@"; exit $?'
        )
        command = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            inside,
            "sh",
        ]
        words = [sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run([*command, *words], env=os.environ | {INSIDE: "1"}, check=False).returncode)
    name = f"reliability-{given.what}"
    earlier = json.loads((RESULTS / f"{name}.json").read_text()) if given.more else {}
    run = Run(Machine(given.home.resolve()), time.monotonic() + 60 * given.minutes, random.Random())
    run.counts.update(earlier.get("counts", {}))
    run.findings += earlier.get("findings", [])
    began = time.monotonic()
    {"litter": litter, "hostile": hostile, "kills": kills}[given.what](run, given.count)
    command = ["python", "benchmarks/reliability.py", given.what, "--home", "HOME"]
    made = {"date": facts.today(), "command": command, "machine": facts.machine()}
    seconds = round(time.monotonic() - began + earlier.get("seconds", 0.0), 1)
    counts = dict(sorted(run.counts.items()))
    finish(
        name,
        made | {"seconds": seconds, "counts": counts, "found": len(run.findings), "findings": run.findings},
    )


if __name__ == "__main__":
    main()
