"""Compare the hardware and runtime fields of a bundle's key with this machine.

A fingerprint is flat: names of key fields with their values, such as {"hardware.cpu.model": "..."}. Model and engine fields
do not depend on the machine and are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldstart.artifacts.key import Scalar
from coldstart.artifacts.verify import Finding

GROUPS = ("hardware", "runtime")
CODE = "CS-KEY-MISMATCH"


def host() -> dict[str, Scalar]:
    """Return the fingerprint of this machine. Raises ColdstartError where vLLM is not installed."""
    from coldstart.models import keys
    from coldstart.system import runtime

    hardware = keys.hardware_fields(on_cpu=runtime.targets_cpu())
    groups: dict[str, Mapping[str, Scalar]] = {"hardware": hardware, "runtime": runtime.fields()}
    return {f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()}


def compare(key: Mapping[str, Scalar], fingerprint: Mapping[str, Scalar], name: str) -> list[Finding]:
    """Return one error for each field in which the machine differs from the machine of the bundle."""
    fields = sorted(field for field in {*key, *fingerprint} if field.partition(".")[0] in GROUPS)
    return [
        _finding(field, key.get(field), fingerprint.get(field), name)
        for field in fields
        if key.get(field) != fingerprint.get(field)
    ]


def _finding(field: str, required: Scalar, present: Scalar, name: str) -> Finding:
    message = f"{field}: the bundle requires {required!r}, the machine has {present!r}"
    return Finding(CODE, "error", message, f"on that machine: coldstart materialize {name}", field)
