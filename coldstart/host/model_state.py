"""State machine of one model on one host, without I/O.

stopped, asleep --start--> starting --ready--> ready --drain--> draining --left--> asleep or stopped
starting --fail--> failed (until retry_at) --start--> starting;  any with a process --fail--> failed

Invariants: a model has at most one start at a time and leaves a tier only without requests in flight. After n failures in a
row, it is not started for backoff * 2^(n-1) seconds, or `backoff_max` if that is less. A successful start resets the count.
Failures that the model did not cause do not count: a killed start is repeated after `backoff`, and a killed server is
restarted immediately. The requests of a killed start wait for the next start, until MAX_KILLED_STARTS starts in a row were
killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from coldstart.host.events import Failure
from coldstart.host.specification import ModelSpec, ObservedCosts, Tier


class ModelState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FAILED = "failed"


# Number of killed starts in a row after which requests are rejected.
MAX_KILLED_STARTS = 3
RESIDENT = (ModelState.STARTING, ModelState.READY, ModelState.DRAINING)
STARTABLE = (ModelState.STOPPED, ModelState.ASLEEP, ModelState.FAILED)


class IllegalTransitionError(RuntimeError):
    """The state of a model does not allow an event. This is a bug in the caller of `Core`, not a failure of the model."""


@dataclass(slots=True)
class Model:
    """State of one model.

    `tier` is the current tier, or the tier from which a start began. `drain_target` is the next tier of a draining
    model, `drain_reason` is the reason for its last drain, and `evicted_for` is the model that needed its memory.
    `is_tier_change_ordered` is True while a server carries out an ordered tier change. `state_since` is the time of the last
    state change. `idle_since` is the same time, or the end of the last running request if that is later. `waiting` maps the
    waiting requests to the times of their arrival. A retired model is no longer configured. `replacement_bytes` is the memory
    of a second server that replaces the first, or 0 if there is none.
    """

    spec: ModelSpec
    state: ModelState = ModelState.STOPPED
    observed: ObservedCosts = field(init=False)
    tier: Tier = field(init=False)
    drain_target: Tier | None = None
    drain_reason: str = ""
    evicted_for: str | None = None
    is_tier_change_ordered: bool = False
    waiting: dict[str, float] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)
    consecutive_failures: int = 0
    killed_starts: int = 0
    failure: Failure | None = None
    retry_at: float = 0.0
    idle_since: float = 0.0
    state_since: float | None = None
    is_retired: bool = False
    replacement_bytes: int = 0

    def __post_init__(self) -> None:
        self.observed, self.tier = ObservedCosts(self.spec), self.spec.tiers[-1]

    def start(self, now: float) -> None:
        self._require_state("start", *STARTABLE)
        if now < self.retry_at:
            raise IllegalTransitionError(
                f"model {self.spec.name} must not start for another {self.retry_at - now:.1f} s, because a start failed"
            )
        self._enter(ModelState.STARTING, now)

    def record_ready(self, now: float, seconds: float) -> None:
        self._require_state("ready", ModelState.STARTING)
        self.observed.record_start(self.tier, seconds)
        self.tier, self.consecutive_failures, self.failure, self.retry_at = self.spec.tiers[0], 0, None, 0.0
        self.killed_starts = 0
        self._enter(ModelState.READY, now)

    def drain(self, target: Tier, now: float, why: str = "", evicted_for: str | None = None) -> None:
        """Stop accepting requests. After its last running request, the model moves to the tier `target`."""
        self._require_state("drain", ModelState.READY, ModelState.ASLEEP)
        self.drain_target, self.drain_reason, self.evicted_for = target, why, evicted_for
        self._enter(ModelState.DRAINING, now)

    def order_tier_change(self) -> bool:
        """Mark the tier change as ordered if no request of the model is running. Return whether this call marked it."""
        self._require_state("leave", ModelState.DRAINING)
        can_leave = not self.is_tier_change_ordered and not self.in_flight
        self.is_tier_change_ordered = self.is_tier_change_ordered or can_leave
        return can_leave

    def complete_tier_change(self, now: float) -> None:
        self._require_state("left", ModelState.DRAINING)
        if self.in_flight or self.drain_target is None:
            raise IllegalTransitionError(
                f"model {self.spec.name} changed its tier with {len(self.in_flight)} requests in flight"
            )
        self.tier = self.drain_target
        self._enter(ModelState.STOPPED if self.tier is self.spec.tiers[-1] else ModelState.ASLEEP, now)

    def record_failure(
        self, failure: Failure, now: float, backoff_s: float, backoff_max_s: float, *, external: bool = False
    ) -> None:
        """Record that the model's process exited or failed to start. The caller must end the model's requests.

        If `external` is set, the model is not the cause. The module docstring explains the time until the next start.
        """
        self._require_state("fail", *RESIDENT, ModelState.ASLEEP)
        self.failure, self.tier = failure, self.spec.tiers[-1]
        killed = external and self.state is ModelState.STARTING
        self.killed_starts = self.killed_starts + 1 if killed else 0
        if not external:
            self.consecutive_failures += 1
            self.retry_at = now + min(backoff_max_s, backoff_s * 2 ** min(self.consecutive_failures - 1, 60))
        else:
            self.retry_at = now + min(backoff_max_s, backoff_s) if killed else now
        self._enter(ModelState.FAILED, now)

    def end_request(self, request: str, now: float) -> None:
        """Remove a request that has ended."""
        self.in_flight.discard(request)
        if self.is_idle:
            self.idle_since = now

    def apply_spec(self, spec: ModelSpec) -> None:
        """Apply a new specification. Measured values are kept if the tiers are unchanged."""
        if spec.tiers != self.spec.tiers:
            names = {tier.name: tier for tier in spec.tiers}
            self.observed = ObservedCosts(spec)
            self.tier = names.get(self.tier.name, spec.tiers[-1])
            self.drain_target = (
                None if self.drain_target is None else names.get(self.drain_target.name, spec.tiers[-1])
            )
        self.spec, self.is_retired = spec, False

    @property
    def repeats_start(self) -> bool:
        """Return whether pending requests wait for another start because the last start was killed."""
        return self.state is ModelState.FAILED and 0 < self.killed_starts < MAX_KILLED_STARTS

    @property
    def error(self) -> str:
        """Return the cause of the last failure, or "" after a successful start."""
        return "" if self.failure is None else str(self.failure)

    @property
    def is_being_replaced(self) -> bool:
        """Return whether a second server of this ready model is starting, or has taken over its requests."""
        return self.state is ModelState.READY and self.replacement_bytes > 0

    @property
    def is_idle(self) -> bool:
        return self.state is ModelState.READY and not self.in_flight

    @property
    def is_resident(self) -> bool:
        return self.state in RESIDENT

    def _enter(self, state: ModelState, now: float) -> None:
        self.state, self.idle_since, self.is_tier_change_ordered = state, now, False
        self.state_since = now
        if state is not ModelState.DRAINING:
            self.drain_target, self.replacement_bytes = None, 0

    def _require_state(self, event: str, *states: ModelState) -> None:
        if self.state not in states:
            raise IllegalTransitionError(
                f"event {event!r} is invalid for model {self.spec.name} in state {self.state}"
            )
