"""Run a benchmark: prepare and warm up every mode, run interleaved rounds, and return the measurements.

A mode that cannot run is dropped with a reason, and the other modes continue. If a mode is dropped because its server
exited, the benchmark fails (see `result.list_failures`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coldstart.bench import run_order
from coldstart.bench.measure import MeasuredRun, RunSettings, SteadyState, run
from coldstart.contract import fallback
from coldstart.errors import NO_BUNDLE, ColdstartError, CommandFailedError, NoBundleError
from coldstart.validate.launch import Launcher, ModeUnavailableError, ServerExitedError

Progress = Callable[[str], None]


@dataclass
class BenchRuns:
    """Measured runs by mode, and the modes that could not run or whose server failed."""

    modes: Sequence[str]
    runs: dict[str, list[MeasuredRun]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def drop_mode(self, mode: str, reason: str) -> None:
        """Drop a mode and its measurements, which are incomplete."""
        self.runs.pop(mode, None)
        self.unavailable[mode] = reason

    def steady(self, mode: str) -> dict[int, SteadyState]:
        """Return the steady state of a mode by round, or an empty mapping if it was not measured."""
        return {run.round: run.steady for run in self.runs.get(mode, ()) if run.steady}


@dataclass
class Bench:
    """Benchmark of several launchers. `work` is an empty directory for caches, logs and events.

    After each run, `on_run` is called with all runs so far, because a benchmark that takes hours may be interrupted.
    """

    launchers: Sequence[Launcher]
    settings: RunSettings
    work: Path
    progress: Progress
    on_run: Callable[[BenchRuns], None] = lambda _: None
    _runs_started: int = 0
    _runs_planned: int = 0

    def measure(self, runs: int, warmup: int) -> BenchRuns:
        """Run the benchmark, and return the measurements.

        All servers and templates that it started are stopped, even after errors. Raises NoBundleError if a coldstart mode
        finds no bundle.
        """
        modes = [launcher.mode for launcher in self.launchers]
        measured = BenchRuns(modes)
        cold_first = modes[0] == run_order.VLLM_COLD
        warmups = {mode: run_order.count_warmups(mode, warmup, cold_first=cold_first) for mode in modes}
        self._runs_planned = sum(warmups.values()) + runs * len(modes)
        try:
            for launcher in self.launchers:
                self._prepare(launcher, measured)
                self._warm_up(launcher, warmups[launcher.mode], measured)
            for index in range(runs):
                first = index % len(modes)
                self._run_round(index, [*modes[first:], *modes[:first]], measured)
        finally:
            self._close_launchers()
        return measured

    def _prepare(self, launcher: Launcher, measured: BenchRuns) -> None:
        try:
            launcher.prepare()
        except ModeUnavailableError as error:
            measured.drop_mode(launcher.mode, str(error))
        except CommandFailedError as error:
            measured.failed.add(launcher.mode)
            measured.drop_mode(launcher.mode, error.message)

    def _warm_up(self, launcher: Launcher, count: int, measured: BenchRuns) -> None:
        for number in range(count):
            if launcher.mode not in measured.unavailable:
                self._run_once(launcher, f"warm-up-{number}", -1, measured)

    def _run_round(self, index: int, order: Sequence[str], measured: BenchRuns) -> None:
        by_mode = {launcher.mode: launcher for launcher in self.launchers}
        for mode in order:
            if mode in measured.unavailable:
                continue
            self._run_once(by_mode[mode], f"round-{index}", index, measured)
            # The first cold start should have filled the warm caches.
            cold_failed = mode == run_order.VLLM_COLD and index == 0 and mode in measured.failed
            if cold_failed and run_order.VLLM_WARM in by_mode:
                self._warm_up(by_mode[run_order.VLLM_WARM], 1, measured)

    def _run_once(self, launcher: Launcher, name: str, index: int, measured: BenchRuns) -> None:
        directory = self.work / launcher.mode / name
        self._runs_started += 1
        self.progress(f"{launcher.mode} {name} ({self._runs_started} of {self._runs_planned}) ...")
        try:
            # vllm-cold differs from vllm-warm only in its start.
            steady = self.settings.measure_steady_state and launcher.mode != run_order.VLLM_COLD
            finished = run(launcher, directory, replace(self.settings, measure_steady_state=steady), index)
        except ColdstartError as error:
            if isinstance(error, ServerExitedError) and error.status == NO_BUNDLE:
                raise NoBundleError(error.lines, hint="run `coldstart materialize MODEL`") from error
            if not isinstance(error, CommandFailedError):
                raise
            measured.failed.add(launcher.mode)
            measured.drop_mode(launcher.mode, error.message)
            return
        started = finished.readiness.get("mode", finished.mode)
        if started != finished.mode:
            reasons = (
                "; ".join(map(str, fallback.decode_fallbacks(finished.readiness.get("fallbacks"))))
                or "no reason reported"
            )
            measured.drop_mode(finished.mode, f"the server started in mode {started} instead: {reasons}")
        elif finished.round >= 0:
            measured.runs.setdefault(finished.mode, []).append(finished)
        self.on_run(measured)
        self.progress(f"{launcher.mode} {name}: first token after {finished.first_token_s:.2f} s")
        shutil.rmtree(directory)

    def _close_launchers(self) -> None:
        for launcher in self.launchers:
            try:
                launcher.close()
            except (ModeUnavailableError, CommandFailedError) as error:
                self.progress(f"{launcher.mode}: {error}")
