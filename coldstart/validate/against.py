"""Compare the hardware and runtime fields of a bundle's key with the fingerprint of a machine.

A fingerprint is flat: names of key fields with their values, such as {"hardware.cpu.model": "..."}. Only the groups that it
names are compared. Model and engine fields do not depend on the machine and are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coldstart.artifacts import canonical
from coldstart.artifacts.key import Scalar
from coldstart.artifacts.verify import Finding
from coldstart.errors import UsageError, describe

GROUPS = ("hardware", "runtime")
CODE = "CS-KEY-MISMATCH"
WRAPPINGS = ("key", "fields", "fingerprint")
HINT = "save one on that machine: coldstart inspect MODEL --key --format json -o FILE"


def host() -> dict[str, Scalar]:
    """Return the fingerprint of this machine. Raises ColdstartError where vLLM is not installed."""
    from coldstart.models import keys
    from coldstart.system import runtime

    hardware = keys.hardware_fields(on_cpu=runtime.targets_cpu())
    groups: dict[str, Mapping[str, Scalar]] = {"hardware": hardware, "runtime": runtime.fields()}
    return {f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()}


def load(path: Path) -> dict[str, Scalar]:
    """Read a fingerprint: a flat object, or one under "key", "fields" or "fingerprint". Raises UsageError."""
    try:
        document = canonical.read(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read fingerprint {path}: {describe(error)}", hint=HINT) from error
    for name in WRAPPINGS:
        if isinstance(document, dict) and isinstance(document.get(name), dict):
            document = document[name]
    fields = (
        {} if not isinstance(document, dict) else {k: v for k, v in document.items() if _group(k) in GROUPS}
    )
    if not fields:
        raise UsageError(f"cannot use fingerprint {path}: it has no hardware or runtime field", hint=HINT)
    return fields


def compare(key: Mapping[str, Scalar], fingerprint: Mapping[str, Scalar], name: str) -> list[Finding]:
    """Return one error for each field in which the machine differs from the machine of the bundle."""
    groups = {_group(field) for field in fingerprint} & set(GROUPS)
    fields = sorted(field for field in {*key, *fingerprint} if _group(field) in groups)
    return [
        _finding(field, key.get(field), fingerprint.get(field), name)
        for field in fields
        if key.get(field) != fingerprint.get(field)
    ]


def _finding(field: str, required: Scalar, present: Scalar, name: str) -> Finding:
    message = f"{field}: the bundle requires {required!r}, the machine has {present!r}"
    return Finding(CODE, "error", message, f"on that machine: coldstart materialize {name}", field)


def _group(field: str) -> str:
    return field.partition(".")[0]
