"""Cycles of every kind in turn."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.reliability.left import more, settled, there
from benchmarks.reliability.run import VLLM, Run, serving, tail


def litter(run: Run, count: int) -> None:
    """Cycles of every kind in turn; what is there after the first of each is what may be there at the end."""
    run.command("materialize", "tiny-llama", "--", *VLLM)
    model = next((run.machine.cache / "models").glob("*/tiny-llama"))
    kinds = [
        ("template-engine", lambda: cycle(run, "template-engine")),
        ("template-engine, command killed", lambda: cycle(run, "template-engine", number=signal.SIGKILL)),
        ("template-engine, server killed", lambda: cycle(run, "template-engine", server=True)),
        ("killed while it starts", lambda: cycle(run, "auto", after_s=run.chance.uniform(0.1, 3))),
        ("interrupted while it starts", lambda: cycle(run, "auto", number=signal.SIGINT, after_s=1.0)),
        ("fresh", lambda: cycle(run, "fresh")),
        ("fresh, command killed", lambda: cycle(run, "fresh", number=signal.SIGKILL)),
        ("weights fetched", lambda: cycle(run, "auto", "--weights-from", str(model))),
        ("refused: no bundle", lambda: _refused(run, 3, ("--max-model-len", "77"))),
        (
            "refused: vLLM takes no such flag",
            lambda: _refused(run, 1, (*VLLM, "--seed", "x"), "--on-miss=warn"),
        ),
        ("stepped down: no snapshot", lambda: cycle(run, "snapshot")),
        ("template started and stopped", lambda: _templates(run)),
    ]
    started = run.command("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)
    if started.returncode:
        raise SystemExit(started.stdout[-2000:])
    for _, act in kinds:
        act()
    before = there(run)
    for number in range(count):
        if run.over:
            break
        name, act = kinds[number % len(kinds)]
        act()
        run.counts[name] += 1
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
