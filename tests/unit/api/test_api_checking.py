"""`validate` and `validate_all`: one report for each bundle, and options that contradict the level."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import BundleNotFoundError, Store
from tools.bundles import publish

from coldstart import api
from coldstart.errors import UsageError


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return publish(Store(tmp_path / "bundles"), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "deep"}, "invalid level 'deep'"),
        ({"vllm_args": ["--dtype", "half"]}, "level checksum starts no server"),
        ({"model": "/m"}, "cannot use --model"),
        ({"vllm_args": "--dtype half"}, "expected a sequence of strings"),
    ],
)
def test_validate_refuses_options_that_cannot_be_used(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        api.validate("tiny:v1", cache_dir=tmp_path, **options)  # type: ignore[arg-type]


def test_validate_raises_for_a_reference_of_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError):
        api.validate("tiny:v1", cache_dir=tmp_path)
