"""Does a bundle fit a machine: its key's hardware and runtime fields against a fingerprint.

A fingerprint is flat: key field names with their values, such as {"hardware.cpu.model": "..."}; it is held
against the groups that it names. Model and engine fields say what the bundle is for, not where it fits, and
are never compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from coldstart.artifacts.key import Scalar
from coldstart.artifacts.verify import Finding
from coldstart.errors import Usage

GROUPS = ("hardware", "runtime")
CODE = "CS-KEY-MISMATCH"
WRAPPINGS = ("key", "fields", "fingerprint")
MEND = "save one on the machine: coldstart inspect MODEL --key --format json -o FILE"


def host() -> dict[str, Scalar]:
    """This machine's fingerprint. Raises ColdstartError where vLLM is not installed."""
    from coldstart.key import keys
    from coldstart.machine import runtime

    hardware = keys.hardware_fields(on_cpu=runtime.targets_cpu())
    groups: dict[str, Mapping[str, Scalar]] = {"hardware": hardware, "runtime": runtime.fields()}
    return {f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()}


def load(path: Path) -> dict[str, Scalar]:
    """A saved fingerprint: a flat object, or one under "key", "fields" or "fingerprint". Raises Usage."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Usage(f"the fingerprint {path.name} cannot be read: {error}", mend=MEND) from error
    for name in WRAPPINGS:
        if isinstance(document, dict) and isinstance(document.get(name), dict):
            document = document[name]
    fields = (
        {} if not isinstance(document, dict) else {k: v for k, v in document.items() if _group(k) in GROUPS}
    )
    if not fields:
        raise Usage(f"{path.name} holds no hardware or runtime field", mend=MEND)
    return fields


def compare(key: Mapping[str, Scalar], fingerprint: Mapping[str, Scalar], name: str) -> list[Finding]:
    """One error per field in which the machine differs from what the bundle was made for."""
    groups = {_group(field) for field in fingerprint} & set(GROUPS)
    fields = sorted(field for field in {*key, *fingerprint} if _group(field) in groups)
    return [
        _finding(field, key.get(field), fingerprint.get(field), name)
        for field in fields
        if key.get(field) != fingerprint.get(field)
    ]


def _finding(field: str, made_for: Scalar, present: Scalar, name: str) -> Finding:
    message = f"{field}: the bundle was made for {made_for!r}, the machine has {present!r}"
    return Finding(CODE, "error", message, f"make one for that machine: coldstart materialize {name}", field)


def _group(field: str) -> str:
    return field.partition(".")[0]
