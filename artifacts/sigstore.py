"""Signature that other tools can verify: a sigstore bundle (v0.3) with a DSSE envelope of an in-toto statement.

The signed bytes are PAE = "DSSEv1 " + len(type) + " " + type + " " + len(body) + " " + body (the DSSE protocol, v1). The
body contains the digest of the manifest. `cosign sign --key` writes the same format.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from hashlib import sha256

from coldstart.artifacts import canonical, fields
from coldstart.artifacts.errors import BundleError, InvalidSignatureError
from coldstart.artifacts.limits import LIMITS
from cryptography.exceptions import InvalidSignature as CryptographyMismatch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://sigstore.dev/cosign/sign/v1"
_SIGNATURES = 16


def statement(digest: str) -> bytes:
    """Return the in-toto statement about the manifest `digest` (sha256:<hex>)."""
    return canonical.dumps(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {},
        }
    )


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return DSSE's pre-authentication encoding, the signed bytes."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def make(digest: str, public: Ed25519PublicKey, sign: Callable[[bytes], bytes]) -> bytes:
    """Return the sigstore bundle over a manifest's digest, in canonical JSON."""
    body = statement(digest)
    envelope = {
        "payload": _b64(body),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": _b64(sign(pae(body)))}],
    }
    material = {"publicKey": {"hint": hint(public)}, "tlogEntries": []}
    return canonical.dumps(
        {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
    )


def hint(public: Ed25519PublicKey) -> str:
    """Return cosign's identifier of a key: base64 of the sha256 of its SubjectPublicKeyInfo."""
    return _b64(sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest())


def is_bundle(document: bytes) -> bool:
    """Return whether a signature document has this form."""
    try:
        members = canonical.loads(document, cap=LIMITS.signature, what="signature")
    except BundleError:
        return False
    return isinstance(members, dict) and members.get("mediaType") == MEDIA_TYPE


def signer(document: bytes, digest: str, keys: Iterable[Ed25519PublicKey]) -> Ed25519PublicKey | None:
    """Return the key of `keys` that signed the document about `digest`, or None; the hint in the document is not trusted.

    Raises InvalidSignatureError if it is malformed or about another bundle.
    """
    body, signatures = _parse(document)
    if not _is_about(body, digest):
        raise InvalidSignatureError("the signature is about another bundle")
    signed = pae(body)
    return next((key for key in keys if any(_verifies(key, one, signed) for one in signatures)), None)


def _parse(document: bytes) -> tuple[bytes, list[bytes]]:
    members = fields.mapping(canonical.loads(document, cap=LIMITS.signature, what="signature"), "signature")
    envelope = fields.mapping(members.get("dsseEnvelope"), "dsseEnvelope")
    if members.get("mediaType") != MEDIA_TYPE or envelope.get("payloadType") != PAYLOAD_TYPE:
        raise InvalidSignatureError("the signature is not a sigstore bundle of an in-toto statement")
    listed = fields.items(envelope.get("signatures"), "signatures", cap=_SIGNATURES)
    try:
        parts = [fields.mapping(item, "signatures").get("sig") for item in listed]
        return _bytes(envelope.get("payload")), [_bytes(part) for part in parts]
    except ValueError as error:
        raise InvalidSignatureError("the signature is malformed") from error


def _is_about(body: bytes, digest: str) -> bool:
    document = fields.mapping(canonical.loads(body, cap=LIMITS.signature, what="statement"), "statement")
    if document.get("_type") != STATEMENT_TYPE or document.get("predicateType") != PREDICATE_TYPE:
        return False
    subjects = fields.items(document.get("subject"), "statement.subject", cap=1)
    named = [fields.texts(fields.mapping(one, "subject").get("digest"), "digest") for one in subjects]
    return any(one.get("sha256") == digest.removeprefix("sha256:") for one in named)


def _verifies(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except CryptographyMismatch:
        return False
    return True


def _bytes(value: object) -> bytes:
    return base64.b64decode(fields.text(value, "base64", cap=LIMITS.signature), validate=True)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
