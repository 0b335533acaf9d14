"""Iteration-level scheduling policies in pure Python, shared by the simulator and the vLLM adapter.

Names are imported at first use: a start with vLLM's own scheduler needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldstart.scheduling.job import Job as Job
    from coldstart.scheduling.mlfq import SkipJoinMlfq as SkipJoinMlfq
    from coldstart.scheduling.policy import Policy as Policy
    from coldstart.scheduling.policy import Turns as Turns
    from coldstart.scheduling.policy import pick as pick
    from coldstart.scheduling.profile import IterationProfile as IterationProfile
    from coldstart.scheduling.profile import ProfileError as ProfileError
    from coldstart.scheduling.settings import STRATEGIES as STRATEGIES
    from coldstart.scheduling.settings import SchedulerSettings as SchedulerSettings

_NAMES = {
    "job": ("Job",),
    "mlfq": ("SkipJoinMlfq",),
    "policy": ("Policy", "Turns", "pick"),
    "profile": ("IterationProfile", "ProfileError"),
    "settings": ("STRATEGIES", "SchedulerSettings"),
}


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
