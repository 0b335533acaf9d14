"""Runner of a benchmark: prepare and warm up every mode, run the interleaved rounds, return the measurements.

A mode that cannot run is dropped with its reason and the others continue. A server that dies is also a reason, and
makes the benchmark fail (see `result.failures`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coldstart.bench import floor, run_order
from coldstart.bench.measure import Run, RunSettings, Steady, run
from coldstart.contract import fallback
from coldstart.errors import NO_BUNDLE, ColdstartError, CommandFailedError, NoBundleError
from coldstart.validate.launch import Launcher, ModeUnavailableError, ServerDiedError

Progress = Callable[[str], None]


@dataclass
class BenchRuns:
    """Counted runs by mode, modes that could not run, and servers that failed."""

    modes: Sequence[str]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    imports_s: list[float] = field(default_factory=list)
    no_floor: str | None = None

    def drop(self, mode: str, reason: str) -> None:
        """Drop a mode and its earlier measurements, which would be an incomplete result."""
        self.runs.pop(mode, None)
        self.unavailable[mode] = reason

    def steady(self, mode: str) -> dict[int, Steady]:
        """Return the steady state of a mode by round; empty if none was measured."""
        return {run.round: run.steady for run in self.runs.get(mode, ()) if run.steady}


@dataclass
class Bench:
    """One benchmark over `launchers`; `work` is an empty directory for caches, logs and events.

    `keep` receives all runs so far after each run, because a benchmark of hours can be cut off.
    """

    launchers: Sequence[Launcher]
    settings: RunSettings
    work: Path
    progress: Progress
    measure_floor: bool = True
    keep: Callable[[BenchRuns], None] = lambda _: None
    _started: int = 0
    _planned: int = 0

    def measure(self, runs: int, warmup: int) -> BenchRuns:
        """Run the benchmark; every server and template that it started has ended afterwards, also on errors.

        Raises NoBundleError if a mode of coldstart finds no bundle.
        """
        modes = [launcher.mode for launcher in self.launchers]
        measured = BenchRuns(modes)
        cold_first = modes[0] == run_order.VLLM_COLD
        warmups = {mode: run_order.count_warmups(mode, warmup, cold_first=cold_first) for mode in modes}
        self._planned = sum(warmups.values()) + runs * len(modes)
        try:
            for launcher in self.launchers:
                self._prepare(launcher, measured)
                self._warm(launcher, warmups[launcher.mode], measured)
            for index in range(runs):
                first = index % len(modes)
                self._round(index, [*modes[first:], *modes[:first]], measured)
        finally:
            self._close()
        return measured

    def _prepare(self, launcher: Launcher, measured: BenchRuns) -> None:
        try:
            launcher.prepare()
        except ModeUnavailableError as error:
            measured.drop(launcher.mode, str(error))
        except CommandFailedError as error:
            measured.failed.add(launcher.mode)
            measured.drop(launcher.mode, error.message)

    def _warm(self, launcher: Launcher, count: int, measured: BenchRuns) -> None:
        for number in range(count):
            if launcher.mode not in measured.unavailable:
                self._run(launcher, f"warm-up-{number}", -1, measured)

    def _round(self, index: int, order: Sequence[str], measured: BenchRuns) -> None:
        by_mode = {launcher.mode: launcher for launcher in self.launchers}
        if self.measure_floor and measured.no_floor is None:
            self._import_floor(measured)
        for mode in order:
            if mode in measured.unavailable:
                continue
            self._run(by_mode[mode], f"round-{index}", index, measured)
            # The first cold start should have filled the warm caches.
            cold_failed = mode == run_order.VLLM_COLD and index == 0 and mode in measured.failed
            if cold_failed and run_order.VLLM_WARM in by_mode:
                self._warm(by_mode[run_order.VLLM_WARM], 1, measured)

    def _run(self, launcher: Launcher, name: str, index: int, measured: BenchRuns) -> None:
        directory = self.work / launcher.mode / name
        self._started += 1
        self.progress(f"{launcher.mode} {name} ({self._started} of {self._planned}) ...")
        try:
            # vllm-cold differs from vllm-warm only in its start.
            past = self.settings.steady and launcher.mode != run_order.VLLM_COLD
            done = run(launcher, directory, replace(self.settings, steady=past), index)
        except ColdstartError as error:
            _require_bundle(error)
            measured.failed.add(launcher.mode)
            measured.drop(launcher.mode, error.message)
            return
        started = done.readiness.get("mode", done.mode)
        if started != done.mode:
            reasons = (
                "; ".join(map(str, fallback.decode(done.readiness.get("fallbacks")))) or "no reason given"
            )
            measured.drop(done.mode, f"the server started in mode {started} instead: {reasons}")
        elif done.round >= 0:
            measured.runs.setdefault(done.mode, []).append(done)
        self.keep(measured)
        self.progress(f"{launcher.mode} {name}: first token after {done.first_token_s:.2f} s")
        shutil.rmtree(directory)

    def _import_floor(self, measured: BenchRuns) -> None:
        try:
            measured.imports_s.append(floor.imports_s())
        except ModeUnavailableError as error:
            measured.no_floor = str(error)

    def _close(self) -> None:
        for launcher in self.launchers:
            try:
                launcher.close()
            except (ModeUnavailableError, CommandFailedError) as error:
                self.progress(f"{launcher.mode}: {error}")


def _require_bundle(error: ColdstartError) -> None:
    if isinstance(error, ServerDiedError) and error.status == NO_BUNDLE:
        raise NoBundleError(error.message, hint="coldstart materialize MODEL") from error
    if not isinstance(error, CommandFailedError):
        raise error
