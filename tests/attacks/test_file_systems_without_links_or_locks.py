"""File systems without hard links or file locks: signing keys still work, and a store reports the missing locks."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from tools.bundles import publish

from coldstart.validate.checks import check


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_host_key_is_created_without_hard_links(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    made = sign.load_host_key(tmp_path)
    assert sign.load_host_key(tmp_path).fingerprint == made.fingerprint
    path = tmp_path / "signing" / "host.pem"
    assert path.stat().st_mode & 0o077 == 0 and not list(path.parent.glob(".*.partial"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_publish_reports_missing_file_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BundleError) as caught:
        publish(Store(tmp_path / "store"), tmp_path)
    assert caught.value.code == "CS-LOCK" and "--cache-dir" in caught.value.hint


def test_readers_need_no_file_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish(Store(tmp_path / "store"), tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Store(tmp_path / "store").list_bundles() == [made] and check(made) == []
