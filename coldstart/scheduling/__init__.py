"""Iteration-level scheduling policies: pure Python, shared by the simulator and the vLLM adapter."""

from coldstart.scheduling.baselines import Fcfs, FixedPriority, Srpt
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import MlfqSettings, NaiveMlfq, SkipJoinMlfq
from coldstart.scheduling.policy import Policy, Turns, pick
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.scheduling.registry import POLICIES, make_policy

__all__ = [
    "POLICIES",
    "Fcfs",
    "FixedPriority",
    "IterationProfile",
    "Job",
    "MlfqSettings",
    "NaiveMlfq",
    "Policy",
    "ProfileError",
    "SkipJoinMlfq",
    "Srpt",
    "Turns",
    "make_policy",
    "pick",
]
