"""Sigstore signatures: sigstore's model reads them and securesystemslib verifies them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from coldstart.artifacts import oci, sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.oci_layout import list_signatures, read_small_blob
from coldstart.artifacts.store import Store
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tools.bundles import publish


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Bundle:
    return publish(store, tmp_path, signer=sign.load_host_key(tmp_path / "state"))


def _attestation(bundle: Bundle) -> tuple[oci.ImageManifest, bytes]:
    source = bundle.layout
    found = list_signatures(source, bundle.layout.read_entries(), bundle.descriptor)
    (image,) = [image for _, image in found if image.artifact_type == oci.SIGNATURE_TYPE]
    return image, read_small_blob(source, image.layers[0], 1 << 14)


def test_securesystemslib_verifies_the_attestation(bundle: Bundle, tmp_path: Path) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signer = pytest.importorskip("securesystemslib.signer")
    public = sign.load_host_key(tmp_path / "state").private_key.public_key()
    raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    key = signer.SSlibKey("k", "ed25519", "ed25519", {"public": raw})
    envelope = json.loads(_attestation(bundle)[1])["dsseEnvelope"]
    envelope["signatures"] = [{"keyid": "k", **one} for one in envelope["signatures"]]
    read = dsse.Envelope.from_dict(envelope)
    assert read.verify([key], 1)
    assert read.pae() == sign.encode_pae(base64.b64decode(envelope["payload"]))
    said = json.loads(read.payload)
    assert said["subject"][0]["digest"]["sha256"] == bundle.digest.removeprefix("sha256:")
    read.payload = read.payload.replace(b"sha256", b"sha512")
    with pytest.raises(Exception, match="signatures"):
        read.verify([key], 1)


def test_an_envelope_that_securesystemslib_signed_is_trusted_here(store: Store, tmp_path: Path) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signers = pytest.importorskip("securesystemslib.signer")
    other = signers.CryptoSigner.generate_ed25519()
    pem = other._private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    sign.add_trusted_key(tmp_path / "trust", pem, name="theirs")

    class Theirs:
        def sign(self, digest: str) -> bytes:
            envelope = dsse.Envelope(sign.build_statement(digest), sign.PAYLOAD_TYPE, {})
            envelope.sign(other)
            material = {"publicKey": {"hint": "of theirs"}}
            made = {"mediaType": sign.MEDIA_TYPE, "verificationMaterial": material}
            return json.dumps(made | {"dsseEnvelope": envelope.to_dict()}).encode()

    made = publish(store, tmp_path, signer=Theirs())
    verdict = sign.TrustStore(tmp_path / "trust")(made)
    assert verdict.ok
    assert not sign.TrustStore(tmp_path / "empty")(made).ok


@pytest.mark.parametrize("change", ["payload", "sig", "type", "digest", "garbage"])
def test_changed_attestation_does_not_verify(change: str, tmp_path: Path) -> None:
    key = sign.load_host_key(tmp_path / "state")
    digest = f"sha256:{'a' * 64}"
    document = json.loads(key.sign(digest))
    envelope = document["dsseEnvelope"]
    if change == "payload":
        envelope["payload"] = base64.b64encode(sign.build_statement(f"sha256:{'b' * 64}")).decode()
    elif change == "sig":
        envelope["signatures"] = [{"sig": base64.b64encode(bytes(64)).decode()}]
    elif change == "type":
        envelope["payloadType"] = "text/plain"
    elif change == "garbage":
        envelope["signatures"] = [{"sig": "!"}] * 3
    keys = {key.fingerprint: key.private_key.public_key()}
    asked = f"sha256:{'b' * 64}" if change in ("payload", "digest") else digest
    verdict = sign.verify_signature(json.dumps(document).encode(), asked, keys)
    assert not verdict.ok
    assert sign.verify_signature(key.sign(digest), digest, keys).ok
