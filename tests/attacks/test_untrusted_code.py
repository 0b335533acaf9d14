"""Code is used only if a trusted key signed this bundle, no other user could write it, and it lies in its own place."""

import ast
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import UntrustedError
from coldstart.artifacts.store import Store
from tools.bundles import CODE, publish_sections, write_tree

import coldstart
from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.trust.unpacked import unpack_section


class Fixed:
    """Signer that returns a fixed payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def sign(self, digest: str) -> bytes:
        return self._payload.replace(b"DIGEST", digest.encode())


def _bundle(store: Store, scratch: Path, signer: object) -> Bundle:
    code = write_tree(scratch / "code", {"k.so": b"x"})
    return publish_sections(store, signer=signer, compile=code)  # type: ignore[arg-type]


@pytest.mark.parametrize(("signer", "reason"), [(None, "not signed"), ("stranger", "signing key")])
def test_extract_refuses_bundle_without_a_trusted_signature(
    signer: str | None, reason: str, store: Store, tmp_path: Path
) -> None:
    bundle = _bundle(store, tmp_path, signer and sign.load_host_key(tmp_path / signer))
    sign.load_host_key(tmp_path / "state")
    trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
    with pytest.raises(UntrustedError, match=reason) as caught:
        bundle.extract_section("compile", tmp_path / "out", trust=trust)
    assert not (tmp_path / "out").exists() and caught.value.code == "CS-UNTRUSTED"


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b"{}", b" " * 20_000, b"[" * 16_000, b'{"algorithm":"none","signs":"DIGEST"}']
)
def test_malformed_signature(payload: bytes, store: Store, tmp_path: Path) -> None:
    sign.load_host_key(tmp_path / "state")
    result = sign.TrustStore(sign.trust_dir(tmp_path / "state"))(_bundle(store, tmp_path, Fixed(payload)))
    assert not result.is_trusted


PACKAGE = Path(coldstart.__file__).parent


def test_child_processes_do_not_import_from_the_working_directory() -> None:
    starting = [file for file in PACKAGE.rglob("*.py") if '"-m"' in file.read_text()]
    assert len(starting) > 5
    for file in starting:
        for node in ast.walk(ast.parse(file.read_text())):
            words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List) else []
            if "'-m'" in words and any(word.strip("f").startswith("'coldstart.") for word in words):
                assert "'-P'" in words or _elsewhere(file), f"{file}:{node.lineno}"


def _elsewhere(file: Path) -> bool:
    """Return whether the process gets another working directory or is the command line itself"""
    return 'cwd="/"' in file.read_text() or file.name == "launchers.py"


GOOD, EVIL = CODE["kernel.so"], b"arbitrary code of another user's"
Attack = Callable[[Path], None]


@pytest.fixture
def bundle(home: Path, store: Store, tmp_path: Path) -> Bundle:
    code = write_tree(tmp_path / "code", CODE)
    return publish_sections(store, signer=sign.load_host_key(paths.state_dir()), compile=code)


def used(bundle: Bundle, root: Path, refused: list[str] | None = None) -> Path:
    return unpack_section(bundle, "compile", root, inspection.trust, refused)


def _overwrite(place: Path) -> None:
    (place / "kernel.so").write_bytes(EVIL)


def _same_size_and_times(place: Path) -> None:
    file = place / "kernel.so"
    before = file.stat()
    file.write_bytes(bytes(len(GOOD)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_file(place: Path) -> None:
    (place / "other").write_bytes(EVIL)
    (place / "other").rename(place / "kernel.so")


def _replace_directory(place: Path) -> None:
    place.rename(place.with_name("aside"))
    shutil.copytree(place.with_name("aside"), place)
    _overwrite(place)


def _link(place: Path) -> None:
    place.rename(place.with_name("aside"))
    _overwrite(place.with_name("aside"))
    place.symlink_to(place.with_name("aside"))


def _open_parent(place: Path) -> None:
    place.parent.chmod(0o777)


@pytest.mark.parametrize(
    "attack",
    [
        _overwrite,
        _same_size_and_times,
        _replace_file,
        _replace_directory,
        _link,
        lambda place: (place / "kernel.so").unlink(),
        lambda place: (place / "kernel.so").chmod(0o666),
        lambda place: place.chmod(0o777),
        _open_parent,
    ],
)
def test_unpack_replaces_code_when_it_was_changed(bundle: Bundle, attack: Attack) -> None:
    place = used(bundle, paths.Cache.at().unpacked)
    attack(place)
    refused: list[str] = []
    again = used(bundle, paths.Cache.at().unpacked, refused)
    assert (again / "kernel.so").read_bytes() == GOOD and ownership.describe_path_exposure(again) is None
    assert attack is _open_parent or refused
    assert used(bundle, paths.Cache.at().unpacked) == again


def test_unpack_replaces_code_written_meanwhile(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is exiting writes its compile cache to the directory after the start found it empty."""
    place = paths.Cache.at().unpacked / bundle.find_readable_section("compile").digest.removeprefix("sha256:")
    real, writes = Path.mkdir, []

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.name.endswith(".partial") and not writes:
            writes.append(self)
            real(place)
            (place / "kernel.so").write_bytes(EVIL)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert used(bundle, paths.Cache.at().unpacked) == place and writes
    assert (place / "kernel.so").read_bytes() == GOOD and [one.name for one in place.parent.iterdir()] == [
        place.name
    ]


@pytest.mark.parametrize("user", [os.getuid(), *[64321] * (os.getuid() == 0)])
def test_unpack_uses_private_directory_when_others_can_write_to_the_cache(
    user: int, bundle: Bundle, tmp_path: Path
) -> None:
    shared, digest = tmp_path / "shared", bundle.find_readable_section("compile").digest
    shared.mkdir()
    shared.chmod(0o777 if user == os.getuid() else 0o755)
    held = write_tree(shared / digest.removeprefix("sha256:"), {"kernel.so": EVIL})
    for path in (shared, held, held / "kernel.so"):
        os.chown(path, user, user)
    place = used(bundle, shared)
    assert shared not in place.parents and (place / "kernel.so").read_bytes() == GOOD
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_unpack_ignores_record_of_another_directory(bundle: Bundle, tmp_path: Path) -> None:
    place = used(bundle, paths.Cache.at().unpacked)
    copy = tmp_path / "copy" / place.name
    shutil.copytree(place, copy)
    _overwrite(copy)
    again = used(bundle, copy.parent)
    assert (again / "kernel.so").read_bytes() == GOOD
