"""Iteration-level scheduling policies: pure Python, shared by the simulator and the vLLM adapter."""

from coldstart.scheduling.baselines import Fcfs, FixedPriority, Srpt
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import NaiveMlfq, SkipJoinMlfq
from coldstart.scheduling.policy import Policy, Turns, pick
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.scheduling.registry import POLICIES, make_policy
from coldstart.scheduling.settings import STRATEGIES, Choice, SchedulerSettings

__all__ = [
    "POLICIES",
    "STRATEGIES",
    "Choice",
    "Fcfs",
    "FixedPriority",
    "IterationProfile",
    "Job",
    "NaiveMlfq",
    "Policy",
    "ProfileError",
    "SchedulerSettings",
    "SkipJoinMlfq",
    "Srpt",
    "Turns",
    "make_policy",
    "pick",
]
