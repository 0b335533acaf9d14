"""Claims of stores on a shared section: the last existing store may remove it."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldstart.system import paths
from coldstart.system.trust import section_claims

DIGEST, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = tmp_path / "one", tmp_path / "two"
    for store in made:
        store.mkdir()
    return made


def test_section_is_claimed_alone_when_no_other_store_claims_it(stores: tuple[Path, Path]) -> None:
    one, two = stores
    assert not section_claims.is_claimed_alone(DIGEST, one)
    section_claims.claim(DIGEST, one)
    section_claims.claim(OTHER, two)
    assert section_claims.is_claimed_alone(DIGEST, one) and not section_claims.is_claimed_alone(DIGEST, two)
    section_claims.claim(DIGEST, two)
    assert not section_claims.is_claimed_alone(DIGEST, one)
    two.rmdir()
    assert section_claims.is_claimed_alone(DIGEST, one)


def test_give_up_keeps_live_sections_and_the_claims_of_other_stores(stores: tuple[Path, Path]) -> None:
    one, two = stores
    for digest, store in ((DIGEST, one), (OTHER, one), (DIGEST, two)):
        section_claims.claim(digest, store)
    section_claims.give_up(one, {OTHER})
    assert section_claims.is_claimed_alone(DIGEST, two) and section_claims.is_claimed_alone(OTHER, one)
    assert len(list((paths.state_dir() / "sections").iterdir())) == 2
