"""Damage and foreign machines, as findings."""

from coldstart.artifacts import blobs
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.verify import Finding

from coldstart.validate.checks import Level, Validation


def damage(bundle: Bundle, section: str) -> None:
    path = blobs.blob_path(bundle.layout.root, bundle.entry(section).digest)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def never(bundle: Bundle, level: Level) -> list[Finding]:
    raise AssertionError("a server was started")


def test_a_damaged_bundle_is_not_started(bundle: Bundle) -> None:
    damage(bundle, "kv")
    assert Validation("replay", start=never).run(bundle).fails("error")


def test_foreign_machine_is_reported_by_field(bundle: Bundle) -> None:
    foreign = {"hardware.name": "gpu", "hardware.sms": 80, "runtime.vllm": "0.32", "model.name": "other"}
    report = Validation("manifest", fingerprint=foreign).run(bundle)
    assert [finding.subject for finding in report.findings] == ["hardware.name", "hardware.sms"]
    assert {finding.code for finding in report.findings} == {"CS-KEY-MISMATCH"}
    assert "requires 'cpu', the machine has 'gpu'" in report.findings[0].message
