"""Cycles of every kind in turn."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from benchmarks.reliability.left import more, settled, there
from benchmarks.reliability.run import VLLM, Run, serving, tail

MODES = ("fresh", "runtime-snapshot", "template-runtime", "snapshot", "template-engine")
PREPARED = (
    ("materialize", "tiny-llama", "--snapshot", "--", *VLLM),
    ("template", "freeze"),
    ("template", "start", "tiny-llama", "--level", "runtime", "--", *VLLM),
    ("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM),
)


def litter(run: Run, count: int) -> None:
    """`count` rounds: each mode, then one of the other ends. What is there after the first of each may be there at the end."""
    for words in PREPARED:
        if (done := run.command(*words)).returncode:
            raise SystemExit(f"{words}: {done.stdout[-2000:]}")
    model = next((run.machine.cache / "models").glob("*/tiny-llama"))
    others = [
        ("template-engine, command killed", lambda: cycle(run, "template-engine", number=signal.SIGKILL)),
        ("template-engine, server killed", lambda: cycle(run, "template-engine", server=True)),
        ("snapshot, command killed", lambda: cycle(run, "snapshot", number=signal.SIGKILL)),
        ("snapshot, server killed", lambda: cycle(run, "snapshot", server=True)),
        ("fresh, command killed", lambda: cycle(run, "fresh", number=signal.SIGKILL)),
        (
            "killed while it starts",
            lambda: cycle(run, run.chance.choice(MODES), after_s=run.chance.uniform(0.1, 3)),
        ),
        ("interrupted while it starts", lambda: cycle(run, "auto", number=signal.SIGINT, after_s=1.0)),
        ("weights fetched", lambda: cycle(run, "auto", "--weights-from", str(model))),
        ("refused: no bundle", lambda: _refused(run, 3, ("--max-model-len", "77"))),
        (
            "refused: vLLM takes no such flag",
            lambda: _refused(run, 1, (*VLLM, "--seed", "x"), "--on-miss=warn"),
        ),
        ("template stopped and started", lambda: _templates(run)),
    ]
    modes = [(mode, partial(cycle, run, mode)) for mode in MODES]
    for _, act in modes + others:
        act()
    _pruned(run)
    before = settled(run, {})
    first = min(run.counts[mode] for mode in MODES)
    for number in range(first, count):
        for name, act in [*modes, others[number % len(others)]]:
            if run.over:
                break
            act()
            run.counts[name] += 1
            if "killed" in name:
                _pruned(run)
            if (left := more(before, settled(run, before))) is not None:
                run.fail(f"after {name}: {left}")
                before = there(run)
    run.command("template", "stop")
    run.command("prefetch", "stop")
    left = {name: value for name, value in settled(run, {}).items() if name in ("processes", "shared memory")}
    if any(left.values()):
        run.fail(f"at the end: {left}")


def cycle(
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
        if mode not in ("auto", report["mode"]):
            run.fail(f"{mode} {options}: started by {report['mode']}: {report['fallbacks']}")
        if server:
            os.kill(report["pid"], signal.SIGKILL)
            one.process.wait(timeout=60)
        else:
            one.end(number)


def _pruned(run: Run) -> None:
    """What a killed command could not remove itself goes with the next start, or with this."""
    if (done := run.command("prune")).returncode:
        run.fail(f"prune: {done.stdout[-300:]}")


def _refused(run: Run, code: int, vllm: tuple[str, ...], *options: str) -> None:
    done = run.command("serve", "tiny-llama", *options, "--", *vllm)
    if done.returncode != code or "Traceback" in done.stdout.partition("(")[0]:
        run.fail(f"refused with {done.returncode}, not {code}: {done.stdout[-300:]}")


def _templates(run: Run) -> None:
    for words in (("stop", "--level", "runtime"), ("start", "tiny-llama", "--level", "runtime")):
        done = run.command("template", *words, *(("--", *VLLM) if words[0] == "start" else ()))
        if done.returncode:
            run.fail(f"template {words}: {done.stdout[-300:]}")
