"""Benchmark options: the start modes to measure, and the order of their runs.

Every round runs each mode once, so that slow periods of the machine affect all modes alike. The order rotates, so that no
mode always runs after the same other mode, which affects it by the page cache and the heat that it leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.launch import modes
from coldstart.scheduling.declaration import list_settings, setting
from coldstart.system.paths import Cache
from coldstart.validate.launchers import VLLM_COLD as VLLM_COLD
from coldstart.validate.launchers import VLLM_EAGER as VLLM_EAGER
from coldstart.validate.launchers import VLLM_FREE, VLLM_MODES
from coldstart.validate.launchers import VLLM_WARM as VLLM_WARM

# An engine sleeps between the runs of these modes, whose starts wake it.
WAKING_MODES = (modes.STANDBY.name, modes.PARKED_ENGINE.name)
MODES = (VLLM_COLD, VLLM_WARM, VLLM_FREE, VLLM_EAGER, *reversed(modes.list_mode_names()))
_REQUESTED = tuple(mode.name for mode in modes.LADDER if not (mode.auto_on and mode.is_repeatable))
ON_REQUEST = (VLLM_FREE, VLLM_EAGER, *_REQUESTED)
DEFAULT_MODES = tuple(mode for mode in MODES if mode not in ON_REQUEST)
BASELINES = VLLM_MODES
REFERENCE = VLLM_WARM


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark, which fails if a mode that is requested by name cannot run.

    Raises UsageError if a value is out of range or a mode is unknown.
    """

    model: str
    vllm_args: Sequence[str] = ()
    runs: int = setting(5, "Number of measured runs per mode, after the warm-up.", "--runs", minimum=1)
    warmup: int = setting(1, "Number of unmeasured warm-up runs per mode.", "--warmup", minimum=0)
    modes: str | None = setting(
        None,
        f"Comma-separated modes to measure: {', '.join(MODES)}; default: all but {', '.join(ON_REQUEST)}.",
        "--modes",
        "M,...",
    )
    measure_steady_state: bool = setting(
        True, "Also measure latency and throughput after the start.", "--steady/--no-steady"
    )
    ready_timeout_s: float = setting(
        900.0,
        "Abort a start that takes longer than this many seconds.",
        "--ready-timeout",
        "SECONDS",
        exclusive_minimum=0,
    )
    baseline: Path | None = setting(  # noqa: RUF009 - a field
        None, "JSON result of an earlier benchmark to compare with.", "--baseline", "FILE"
    )
    max_regress_pct: float = setting(
        10.0, "Maximum slowdown relative to --baseline, in percent.", "--max-regress", "PCT", minimum=0
    )
    revision: str | None = setting(
        None,
        "Commit, branch or tag of a Hugging Face model; default: the newest commit.",
        "--revision",
        "REV",
    )
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)

    def __post_init__(self) -> None:
        try:
            for name, option in list_settings(self):
                option.require_valid(name, getattr(self, name))
        except ValueError as error:
            raise UsageError(str(error), hint="see `coldstart bench --help`") from error
        if unknown := [mode for mode in self.mode_names if mode not in MODES]:
            hint = f"use --modes with some of {','.join(MODES)}"
            raise UsageError(f"--modes {self.modes}: unknown start mode {unknown[0]!r}", hint=hint)
        if len(set(self.mode_names)) != len(self.mode_names):
            raise UsageError(
                f"--modes {self.modes}: a start mode is listed twice", hint="list each mode once"
            )

    @property
    def mode_names(self) -> list[str]:
        """Return the names of the modes to measure."""
        return self.modes.split(",") if self.modes else list(DEFAULT_MODES)

    @property
    def command_line(self) -> list[str]:
        """Return the command line of an equivalent benchmark."""
        line = ["coldstart", "bench", self.model, "--runs", str(self.runs), "--warmup", str(self.warmup)]
        line += ["--modes", self.modes] if self.modes else []
        line += ["--revision", self.revision] if self.revision else []
        line += [] if self.measure_steady_state else ["--no-steady"]
        return [*line, "--", *self.vllm_args] if self.vllm_args else line


def count_warmups(mode: str, requested: int, *, cold_first: bool) -> int:
    """Return the number of warm-up runs of a mode.

    vllm-cold has no warm-up runs. Modes with warm caches need at least one. If `cold_first` is set, the first cold start
    counts as a warm-up run of vllm-warm, because it fills the caches of vllm-warm.
    """
    if mode == VLLM_COLD:
        return 0
    if mode == VLLM_WARM:
        return max(requested, 1) - cold_first
    return max(requested, 1) if mode in BASELINES else requested
