"""Eviction policies of a host, by name."""

from collections.abc import Callable

from coldstart.errors import UsageError
from coldstart.host.policies.iam import ImportancePolicy
from coldstart.host.policies.predictive import PredictivePolicy
from coldstart.host.policies.protocol import LRU, Costs, ModelCost, Policy

__all__ = ["POLICIES", "Costs", "ModelCost", "Policy", "create_policy"]

POLICIES: dict[str, Callable[[Costs], Policy]] = {
    "lru": LRU,
    "iam": ImportancePolicy,
    "predictive": PredictivePolicy,
}


def create_policy(name: str, costs: Costs) -> Policy:
    """Create the policy `name` for models with these eviction costs. Raises UsageError if the name is unknown."""
    if name not in POLICIES:
        raise UsageError(f"unknown eviction policy {name!r}", hint=f"use one of: {', '.join(POLICIES)}")
    return POLICIES[name](costs)
