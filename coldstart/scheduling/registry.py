"""Policies by their name on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coldstart.scheduling.baselines import Fcfs, FixedPriority, Srpt
from coldstart.scheduling.mlfq import NaiveMlfq, SkipJoinMlfq
from coldstart.scheduling.policy import Policy
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

Maker = Callable[[IterationProfile, SchedulerSettings], Policy]

POLICIES: Mapping[str, Maker] = {
    SkipJoinMlfq.name: SkipJoinMlfq,
    NaiveMlfq.name: NaiveMlfq,
    Fcfs.name: lambda profile, _: Fcfs(profile),
    FixedPriority.name: lambda profile, _: FixedPriority(profile),
    Srpt.name: lambda profile, _: Srpt(profile),
}


def make_policy(name: str, profile: IterationProfile, settings: SchedulerSettings | None = None) -> Policy:
    """Return a new policy. Raises ValueError with the known names if `name` is unknown."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name](profile, settings or SchedulerSettings())
