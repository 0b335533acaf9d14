"""The levels of `validate`; each level includes the levels before it.

`manifest` and `checksum` need neither torch nor vLLM. `load` and `replay` start a server, and only from a bundle that passed
the earlier levels: a damaged bundle, or one for another machine, is not started.

A machine is the hardware and runtime fields of a key, such as {"hardware.cpu.model": "..."}. Model and engine fields do not
depend on the machine and are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.verify import Finding, check

Level = Literal["manifest", "checksum", "load", "replay"]
FailLevel = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("manifest", "checksum", "load", "replay")
STARTING = LEVELS[2:]
SEVERITIES: tuple[FailLevel, ...] = ("note", "warning", "error")
Scalar = str | int | float | bool | None
GROUPS = ("hardware", "runtime")
CODE = "CS-KEY-MISMATCH"


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings about one bundle; `ref` is NAME@sha256:... where it could be read."""

    ref: str
    level: Level
    findings: tuple[Finding, ...]

    def fails(self, level: FailLevel) -> bool:
        """Return whether a finding is at least as severe as `level`."""
        return any(SEVERITIES.index(item.severity) >= SEVERITIES.index(level) for item in self.findings)


def check_bundle(
    bundle: Bundle,
    level: Level = "checksum",
    fingerprint: Mapping[str, Scalar] | None = None,
) -> ValidationReport:
    """Check a bundle up to `level`, without a start. An error of the bundle is a finding; any other error is raised.

    Its key is compared with `fingerprint`, a machine.
    """
    findings = check(bundle, "manifest" if level == "manifest" else "checksum")
    ref = bundle.digest
    with suppress(BundleError):  # the check of the manifest has reported it
        ref = bundle.ref
        if fingerprint is not None:
            findings += compare_machine(bundle.key.fields, fingerprint, bundle.name)
    return ValidationReport(ref, level, tuple(findings))


def describe_machine() -> dict[str, Scalar]:
    """Return the fingerprint of this machine. Raises ColdstartError where vLLM is not installed."""
    from coldstart.models import keys
    from coldstart.system import runtime

    hardware = keys.hardware_fields(on_cpu=runtime.targets_cpu())
    groups: dict[str, Mapping[str, Scalar]] = {"hardware": hardware, "runtime": runtime.fields()}
    return {f"{group}.{name}": value for group, part in groups.items() for name, value in part.items()}


def compare_machine(key: Mapping[str, Scalar], fingerprint: Mapping[str, Scalar], name: str) -> list[Finding]:
    """Return one error for each field in which the machine differs from the machine of the bundle."""
    fields = sorted(field for field in {*key, *fingerprint} if field.partition(".")[0] in GROUPS)
    return [
        _differs(field, key.get(field), fingerprint.get(field), name)
        for field in fields
        if key.get(field) != fingerprint.get(field)
    ]


def _differs(field: str, required: Scalar, present: Scalar, name: str) -> Finding:
    message = f"{field}: the bundle requires {required!r}, the machine has {present!r}"
    return Finding(CODE, "error", message, f"on that machine: coldstart materialize {name}", field)
