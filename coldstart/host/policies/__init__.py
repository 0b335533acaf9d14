"""Policies of the model cache by name: which resident models leave when another needs their memory."""

from collections.abc import Callable

from coldstart.errors import UsageError
from coldstart.host.policies.arc import ARC
from coldstart.host.policies.classic import LFU, LRU, SRRIP
from coldstart.host.policies.gdsf import GDSF
from coldstart.host.policies.iam import IAM, IAMWindow
from coldstart.host.policies.predictive import Predictive
from coldstart.host.policies.protocol import Costs, ModelCost, Policy

__all__ = ["DEFAULT", "POLICIES", "Costs", "ModelCost", "Policy", "make"]

POLICIES: dict[str, Callable[[Costs, int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "arc": ARC,
    "srrip": SRRIP,
    "gdsf": GDSF,
    "iam": IAM,
    "iam-window": IAMWindow,
    "predictive": Predictive,
}
DEFAULT = "predictive"


def make(name: str, costs: Costs, capacity: int) -> Policy:
    """The policy of that name for a cache of `capacity` bytes. Raises UsageError for an unknown name."""
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r}", hint=f"one of {', '.join(POLICIES)}")
    return POLICIES[name](costs, capacity)
