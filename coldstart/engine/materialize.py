"""`materialize`: the offline phase once, proved by a start from its own result, then published in one step.

Nothing is visible before the last rename, so an interrupted run leaves at most a work directory, which the next run removes.
A bundle whose proof start does not take its fast path, or does not answer the reference tokens, is not published.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import coldstart
from coldstart import inspection, models, paths, runtime, timeline
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.artifacts.manifest import Provenance
from coldstart.artifacts.store import Store
from coldstart.engine import launch, prepare, weights
from coldstart.engine.plan import LaunchPlan
from coldstart.errors import Failed, Usage
from coldstart.inspection import Lookup

SECTIONS = ("kv", "compile", "modelinfo", "tokenizer", "weights", "iterations", "stages")
Phase = Callable[[str], AbstractContextManager[None]]
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")


@dataclass(frozen=True)
class Request:
    """What to materialize. `only` restricts the sections; without `force` an existing bundle for the key is returned."""

    model: str
    vllm_args: Sequence[str] = ()
    revision: str | None = None
    offline: bool = False
    cache_dir: Path | None = None
    only: Sequence[str] = ()
    force: bool = False
    snapshot: bool = False

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SECTIONS):
            raise Usage(f"There is no section {', '.join(sorted(unknown))}.", mend=f"choose among {', '.join(SECTIONS)}")

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections to write."""
        return tuple(name for name in SECTIONS if not self.only or name in self.only)


def look_up(request: Request) -> Lookup:
    """The model, its key here, and the bundle that is there already, if any."""
    return inspection.look_up(
        Store(paths.store_dir(request.cache_dir)),
        request.model,
        request.vllm_args,
        offline=request.offline,
        revision=request.revision,
        cache_dir=request.cache_dir,
    )


def materialize(request: Request, phase: Phase) -> Bundle:
    """Make and publish the bundle; `phase(name)` is entered around each stage for whoever shows progress.

    Raises Failed when the engine or the proof fails, NoSpace and ReadOnlyStore from the store.
    """
    store = Store(paths.store_dir(request.cache_dir))
    with store.lock(look_up(request).key):
        # Looked up again: another process may have made it while this one waited for the lock.
        planned = look_up(request)
        if planned.bundle is not None and not request.force:
            bundle = planned.bundle
        else:
            bundle = _make(request, planned, store, phase)
        if request.snapshot and not bundle.has("snapshot"):
            from coldstart.engine import freeze

            bundle = freeze.add_snapshot(bundle, planned.model, request, store, phase)
    return bundle


def _make(request: Request, planned: Lookup, store: Store, phase: Phase) -> Bundle:
    with phase("weights"):
        model = models.ensure_weights(planned.model, offline=request.offline)
    with _workspace(request.cache_dir, planned.key) as work:
        run = _Run(request, replace(planned, model=model), work, phase)
        run.offline()
        run.weights()
        run.prove()
        with phase("publish"), store.begin(planned.key) as draft:
            for name in request.sections:
                run.add(draft, name)
            return draft.publish(run.provenance(), signer=sign.host_key(paths.state_dir()))


@contextmanager
def _workspace(cache_dir: Path | None, key: Key) -> Iterator[Path]:
    """A work directory of this run; those of runs that were killed are removed (the caller holds the key's lock)."""
    root = paths.cache_dir(cache_dir) / "work"
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(f"{key.short}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{key.short}-", dir=root))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Run:
    """The stages of one run, over its work directory."""

    def __init__(self, request: Request, planned: Lookup, work: Path, phase: Phase) -> None:
        self.request, self.model, self.key, self.work, self.phase = request, planned.model, planned.key, work, phase
        self.out = work / "out"
        self.out.mkdir()
        self.seconds: dict[str, float] = {}

    def offline(self) -> None:
        """Start the real engine in a child, in empty caches; its results appear in `out`."""
        env = {"VLLM_CACHE_ROOT": str(self.work / "vllm"), "VLLM_NO_USAGE_STATS": "1"}
        env |= prepare.inductor_env(self.work / "unused")
        plan = LaunchPlan(prepare.base_args(self.model, self.request.vllm_args), key=self.key.digest, env=env)
        plan.save(self.work / "offline.json")
        command = [sys.executable, "-m", "coldstart.engine.offline", str(self.work / "offline.json"), str(self.out)]
        with self._stage("run the engine offline"):
            _run(command, self.work / "offline.log", self.events("offline"))

    def weights(self) -> None:
        """Hash every tensor and chunk of the weights."""
        assert self.model.path is not None  # ensure_weights has set it
        with self._stage("hash the weights"):
            made = weights.plan(self.model.path)
        self._write("weights", made)
        info = self._read("modelinfo")
        info["weights"] = weights.digest(made)
        self._write("modelinfo", info)

    def prove(self) -> None:
        """Start a server from what will be published; it must take the fast path and answer the reference token.

        Its stage costs, time to ready and memory are the bundle's `stages`: what a fleet or cache policy calculates with.
        """
        with self._stage("prove by a start"):
            stages = self._proof_start()
        self._write("stages", stages)

    def _proof_start(self) -> dict[str, Any]:
        info, plan = self._read("modelinfo"), self._proof_plan()
        began = timeline.now()
        environment = {"COLDSTART_TIMELINE_EVENTS": str(self.events("proof"))}
        with (self.work / "proof.log").open("wb") as log:
            process, reader = launch.fresh(replace(plan, env=plan.env | environment), output=log)
            try:
                running = launch.acknowledged(process, reader, began, timeout=None)
                memory = launch.memory_bytes(process.pid)
            except Failed as error:
                raise Failed(f"{error.message} Its end:\n{_tail(self.work / 'proof.log')}") from error
            finally:
                process.signal(signal.SIGTERM)
                process.wait()
        _require_fast_path(running.report, has_code=(self.out / "compile").is_dir(), canary="canary" in info)
        return {
            "ready_s": running.ready_s,
            "memory_bytes": memory,
            "spans": {event["name"]: event["end_s"] - event["start_s"] for event in _events(self.events("proof"))},
            "offline_spans": {e["name"]: e["end_s"] - e["start_s"] for e in _events(self.events("offline"))},
        }

    def _proof_plan(self) -> LaunchPlan:
        info, compile_dir = self._read("modelinfo"), self.out / "compile"
        env = {"VLLM_CACHE_ROOT": str(self.work / "vllm"), "VLLM_NO_USAGE_STATS": "1"}
        args = prepare.base_args(self.model, self.request.vllm_args) + ["--uds", str(self.work / "proof.sock")]
        if not compile_dir.is_dir():
            return LaunchPlan(args, key=self.key.digest, canary=info.get("canary"), env=env)
        # A copy elsewhere: the proof is of a bundle that has moved.
        moved = shutil.copytree(compile_dir, self.work / "moved")
        env |= prepare.inductor_env(moved)
        return LaunchPlan(args, key=self.key.digest, compile_dir=str(moved), canary=info.get("canary"), env=env)

    def add(self, draft: Any, name: str) -> None:
        """Add one section, if this model has it."""
        if name == "tokenizer":
            self._collect_tokenizer()
        path = self.out / name
        if path.is_dir():
            draft.add_tree(name, path)
        elif path.with_suffix(".json").exists():
            draft.add_json(name, self._read(name))

    def _collect_tokenizer(self) -> None:
        assert self.model.path is not None
        target = self.out / "tokenizer"
        target.mkdir()
        for pattern in (*_TOKENIZER, "config.json", "generation_config.json"):
            for file in self.model.path.glob(pattern):
                shutil.copyfile(file, target / file.name)

    def provenance(self) -> Provenance:
        """Who made it, with what, in how long."""
        distribution, version = runtime.vllm_distribution() or ("vllm", "unknown")
        tool = {"coldstart": coldstart.__version__, distribution: version, "torch": runtime.torch_build()["__version__"]}
        return Provenance(
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            tool=tool,
            arguments=list(self.request.vllm_args),
            seconds={name: round(value, 3) for name, value in self.seconds.items()},
            model_name=self.model.name,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = timeline.now()
        with self.phase(name):
            yield
        self.seconds[name] = timeline.now() - start

    def events(self, name: str) -> Path:
        """The timeline events of one of the child processes."""
        return self.work / f"{name}.events"

    def _read(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.out / f"{name}.json").read_text()))

    def _write(self, name: str, value: object) -> None:
        (self.out / f"{name}.json").write_text(json.dumps(value, sort_keys=True))


def _require_fast_path(report: Any, *, has_code: bool, canary: bool) -> None:
    if has_code and not report["fast_path"].get("compile"):
        raise Failed(f"The proof start did not take its fast path: {report['fallbacks']}. Nothing was published.")
    if canary and not report.get("canary"):
        raise Failed("The proof start answered another token than the reference. Nothing was published.")


def _run(command: list[str], log: Path, events: Path) -> None:
    environment = os.environ | {"COLDSTART_TIMELINE_EVENTS": str(events)}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code != 0:
        raise Failed(f"The engine's offline run ended with exit code {code}. Its end:\n{_tail(log)}")


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
