"""Request for a benchmark: the start modes that it measures, and the order of their runs.

Every round contains each mode once, so that slow periods of the machine affect all modes alike. The order rotates, so
that no mode always runs after the same other mode (its page cache, its heat).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.launch import modes
from coldstart.scheduling.declaration import list_settings, setting
from coldstart.system.paths import Cache
from coldstart.validate.launchers import FRESH as FRESH
from coldstart.validate.launchers import PLAIN, VLLM_FREE
from coldstart.validate.launchers import VLLM_COLD as VLLM_COLD
from coldstart.validate.launchers import VLLM_EAGER as VLLM_EAGER
from coldstart.validate.launchers import VLLM_WARM as VLLM_WARM

RUNTIME_SNAPSHOT, TEMPLATE_RUNTIME = modes.RUNTIME_SNAPSHOT.name, modes.TEMPLATE_RUNTIME.name
TEMPLATE_ENGINE, SNAPSHOT = modes.TEMPLATE_ENGINE.name, modes.SNAPSHOT.name
DEFAULT = (VLLM_COLD, VLLM_WARM, *reversed(modes.repeatable_names()))
MODES = (VLLM_COLD, VLLM_WARM, VLLM_FREE, VLLM_EAGER, *DEFAULT[2:])
BASELINES = PLAIN
REFERENCE = VLLM_WARM


@dataclass(frozen=True)
class BenchRequest:
    """Request for a benchmark. A mode that is requested by name must run, or the benchmark fails.

    Raises UsageError if a setting is out of range, or a mode is unknown.
    """

    model: str
    vllm_args: Sequence[str] = ()
    runs: int = setting(5, "Number of measured runs per mode, after the warm-up.", "--runs", least=1)
    warmup: int = setting(1, "Number of warm-up runs per mode, which are not counted.", "--warmup", least=0)
    modes: str | None = setting(
        None,
        f"Modes to measure, of {', '.join(MODES)}; default: all but {VLLM_FREE} and {VLLM_EAGER}.",
        "--modes",
        "M,...",
    )
    steady: bool = setting(
        True, "Also measure latency and throughput after the start.", "--steady/--no-steady"
    )
    ready_timeout_s: float = setting(
        900.0, "Abort a start that takes longer than this.", "--ready-timeout", "SECONDS", above=0
    )
    baseline: Path | None = setting(  # noqa: RUF009 - a field
        None, "JSON result of an earlier run to compare with.", "--baseline", "FILE"
    )
    max_regress_pct: float = setting(
        10.0, "Permitted slowdown over --baseline, in percent.", "--max-regress", "PCT"
    )
    revision: str | None = setting(
        None, "Commit, branch or tag of a hub model; default: the newest commit.", "--revision", "REV"
    )
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)

    def __post_init__(self) -> None:
        try:
            for name, one in list_settings(self):
                one.require(name, getattr(self, name))
        except ValueError as error:
            raise UsageError(str(error), hint="coldstart bench --help") from error
        if unknown := [mode for mode in self.names if mode not in MODES]:
            hint = f"--modes with some of {','.join(MODES)}"
            raise UsageError(f"unknown mode {unknown[0]!r}", hint=hint)
        if len(set(self.names)) != len(self.names):
            raise UsageError(f"--modes {self.modes}: a mode is repeated", hint="name each mode once")

    @property
    def names(self) -> list[str]:
        """Return the modes to measure."""
        return self.modes.split(",") if self.modes else list(DEFAULT)

    @property
    def command_line(self) -> list[str]:
        """Return the command that measures the same."""
        line = ["coldstart", "bench", self.model, "--runs", str(self.runs), "--warmup", str(self.warmup)]
        line += ["--modes", self.modes] if self.modes else []
        line += [] if self.steady else ["--no-steady"]
        return [*line, "--", *self.vllm_args] if self.vllm_args else line


def count_warmups(mode: str, wanted: int, *, cold_first: bool) -> int:
    """Return the number of uncounted runs before the first round.

    A cold start has none, because it must not be warm. Warm caches need at least one earlier start; with `cold_first`
    the cold start of the first round is that start, which fills the caches of vllm-warm alone.
    """
    if mode == VLLM_COLD:
        return 0
    if mode == VLLM_WARM:
        return max(wanted, 1) - cold_first
    return max(wanted, 1) if mode in BASELINES else wanted


def is_process_of_its_own(mode: str) -> bool:
    """Return whether a start in this mode begins with an empty interpreter, and so has to import."""
    return mode in (*BASELINES, FRESH)
