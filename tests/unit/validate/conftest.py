"""Bundles to validate, and reports with difficult characters."""

from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools import bundles

from coldstart.validate.checks import Finding, ValidationReport

NASTY = '50% of "it":\r\n<broken> & gone, \x00\x1b\ufffe'


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Bundle:
    return bundles.publish(store, tmp_path / "scratch")


@pytest.fixture
def reports() -> list[ValidationReport]:
    findings = (
        Finding("CS-DIGEST", "error", NASTY, "coldstart pull, again", "compile"),
        Finding("CS-FALLBACK", "warning", "slow", "coldstart doctor", "serve"),
        Finding("CS-SECTION-UNKNOWN", "note", "new", "", "future"),
    )
    return [
        ValidationReport("org/bad@sha256:ab", "checksum", findings),
        ValidationReport("org/good@sha256:cd", "checksum", ()),
    ]
