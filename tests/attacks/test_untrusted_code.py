"""Code sections need a trusted signature of exactly this bundle, and processes import nothing from the working directory."""

from __future__ import annotations

import ast
import base64
import json
import os
import sys
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.artifacts.errors import UntrustedError
from coldstart.artifacts.store import Store
from tools.bundles import key, provenance, publish, write_tree

import coldstart
from coldstart.models import tiny


class Fixed:
    """Signer that returns a fixed payload."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def sign(self, digest: str) -> bytes:
        return self._payload.replace(b"DIGEST", digest.encode())


class Claiming:
    """Signer whose document names the digest, with a signature of another one."""

    def __init__(self, key: sign.HostKey) -> None:
        self._key = key

    def sign(self, digest: str) -> bytes:
        document = json.loads(self._key.sign(f"sha256:{'0' * 64}"))
        payload = base64.b64encode(sign.build_statement(digest, self._key.fingerprint)).decode()
        return json.dumps(
            document | {"dsseEnvelope": document["dsseEnvelope"] | {"payload": payload}}
        ).encode()


def _bundle(store: Store, scratch: Path, signer: object) -> Bundle:
    with store.open_draft(key()) as draft:
        draft.add_tree("compile", write_tree(scratch / "code", {"k.so": b"x"}))
        return draft.publish(provenance(), signer=signer)  # type: ignore[arg-type]


def _refused(bundle: Bundle, dest: Path, trust: TrustCheck | None) -> UntrustedError:
    with pytest.raises(UntrustedError) as caught:
        bundle.extract_section("compile", dest, trust=trust)
    assert not dest.exists()
    return caught.value


def test_extract_refuses_unsigned_bundle(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    sign.load_host_key(tmp_path / "state")
    trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
    assert "not signed" in _refused(bundle, tmp_path / "out", trust).message


def test_extract_refuses_code_without_a_trust_store(store: Store, tmp_path: Path) -> None:
    assert _refused(publish(store, tmp_path), tmp_path / "out", None).code == "CS-UNTRUSTED"


def test_extract_refuses_signature_of_an_unknown_key(store: Store, tmp_path: Path) -> None:
    bundle = _bundle(store, tmp_path, sign.load_host_key(tmp_path / "stranger"))
    sign.load_host_key(tmp_path / "state")
    trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
    assert "not a trusted key" in _refused(bundle, tmp_path / "out", trust).message


def test_signature_of_another_bundle(store: Store, tmp_path: Path) -> None:
    host = sign.load_host_key(tmp_path / "state")
    payload = host.sign(f"sha256:{'0' * 64}")
    bundle = _bundle(store, tmp_path, Fixed(payload))
    result = sign.TrustStore(sign.trust_dir(tmp_path / "state"))(bundle)
    assert not result.ok and "another bundle" in result.reason


def test_signature_that_claims_this_bundle_but_covers_another(store: Store, tmp_path: Path) -> None:
    host = sign.load_host_key(tmp_path / "state")
    bundle = _bundle(store, tmp_path, Claiming(host))
    result = sign.TrustStore(sign.trust_dir(tmp_path / "state"))(bundle)
    assert not result.ok and "is invalid" in result.reason
    result = sign.TrustStore(sign.trust_dir(tmp_path / "a machine without the key"))(bundle)
    assert not result.ok and "not a trusted key" in result.reason


@pytest.mark.parametrize(
    "payload",
    [b"{", b"[]", b"{}", b" " * 20_000, b"[" * 16_000, b'{"algorithm":"none","signs":"DIGEST"}'],
)
def test_malformed_signature(payload: bytes, store: Store, tmp_path: Path) -> None:
    sign.load_host_key(tmp_path / "state")
    result = sign.TrustStore(sign.trust_dir(tmp_path / "state"))(_bundle(store, tmp_path, Fixed(payload)))
    assert not result.ok


def test_replaced_code_is_found_after_signing(store: Store, tmp_path: Path) -> None:
    from coldstart.artifacts.blobs import blob_path
    from coldstart.artifacts.errors import BundleError

    bundle = _bundle(store, tmp_path, sign.load_host_key(tmp_path / "state"))
    trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
    path = blob_path(store.root, bundle.find_readable_section("compile").digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BundleError) as caught:
        bundle.extract_section("compile", tmp_path / "out", trust=trust)
    assert caught.value.code == "CS-DIGEST"
    assert not (tmp_path / "out").exists()


PACKAGE = Path(coldstart.__file__).parent


@pytest.mark.vllm
def test_a_module_in_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    here = tmp_path / "here"
    here.mkdir()
    for name in ("torch", "coldstart", "tokenizers"):
        (here / f"{name}.py").write_text(f"open({os.fspath(marker)!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", os.fspath(here))])
    assert (tiny.build("tiny-opt", tmp_path / "models") / "config.json").exists()
    assert not marker.exists()


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
