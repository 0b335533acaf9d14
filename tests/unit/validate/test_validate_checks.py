"""Damage and foreign machines, as findings."""

from coldstart.artifacts import blobs
from coldstart.artifacts.bundle import Bundle

from coldstart.validate.checks import check_bundle


def damage(bundle: Bundle, section: str) -> None:
    path = blobs.blob_path(bundle.layout.root, bundle.entry(section).digest)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_found_by_checksum_and_not_by_manifest(bundle: Bundle) -> None:
    damage(bundle, "compile")
    assert check_bundle(bundle, "manifest").findings == ()
    report = check_bundle(bundle, "checksum")
    assert [finding.subject for finding in report.findings] == ["compile"]
    assert report.fails("error")


def test_foreign_machine_is_reported_by_field(bundle: Bundle) -> None:
    foreign = {"hardware.name": "gpu", "hardware.sms": 80, "runtime.vllm": "0.32", "model.name": "other"}
    report = check_bundle(bundle, "manifest", fingerprint=foreign)
    assert [finding.subject for finding in report.findings] == ["hardware.name", "hardware.sms"]
    assert {finding.code for finding in report.findings} == {"CS-KEY-MISMATCH"}
    assert "requires 'cpu', the machine has 'gpu'" in report.findings[0].message
