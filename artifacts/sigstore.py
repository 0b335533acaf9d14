"""Signature of a bundle: a sigstore bundle (v0.3) with a DSSE envelope of an in-toto statement, which other tools verify.

The signed bytes are PAE = "DSSEv1 " + len(type) + " " + type + " " + len(body) + " " + body (the DSSE protocol, v1). The
body contains the digest of the manifest. `cosign sign --key` writes the same format.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Annotated

import msgspec
from coldstart.artifacts import canonical
from coldstart.artifacts.errors import InvalidSignatureError
from coldstart.artifacts.limits import LIMITS
from cryptography.exceptions import InvalidSignature as CryptographyMismatch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://sigstore.dev/cosign/sign/v1"


class _Signature(msgspec.Struct):
    sig: bytes


class _Envelope(msgspec.Struct, rename="camel"):
    payload: bytes
    payload_type: str
    signatures: Annotated[list[_Signature], msgspec.Meta(min_length=1, max_length=16)]


class _Document(msgspec.Struct, rename="camel"):
    media_type: str
    dsse_envelope: _Envelope


class _Subject(msgspec.Struct):
    digest: dict[str, str]


class _Predicate(msgspec.Struct):
    signer: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class _Statement(msgspec.Struct, rename={"type": "_type", "predicate_type": "predicateType"}):
    type: str
    predicate_type: str
    subject: Annotated[list[_Subject], msgspec.Meta(min_length=1, max_length=1)]
    predicate: _Predicate | None = None


def statement(digest: str, signer: str | None = None) -> bytes:
    """Return the in-toto statement about the manifest `digest` (sha256:<hex>). `signer` names the key to readers without it."""
    return canonical.dumps(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"signer": signer} if signer else {},
        }
    )


def pae(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return DSSE's pre-authentication encoding, the signed bytes."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def make(digest: str, public: Ed25519PublicKey, name: str, sign: Callable[[bytes], bytes]) -> bytes:
    """Return the sigstore bundle over a manifest's digest, in canonical JSON. `name` is the key's fingerprint."""
    body = statement(digest, name)
    envelope = {
        "payload": _b64(body),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": _b64(sign(pae(body)))}],
    }
    material = {"publicKey": {"hint": _hint(public)}, "tlogEntries": []}
    return canonical.dumps(
        {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope}
    )


def _hint(public: Ed25519PublicKey) -> str:
    """Return cosign's identifier of a key: base64 of the sha256 of its SubjectPublicKeyInfo."""
    return _b64(sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest())


def verify(
    document: bytes, digest: str, keys: Mapping[str, Ed25519PublicKey]
) -> tuple[str | None, str | None]:
    """Return the name of the key of `keys` that signed the document about `digest`, and the name that the document states.

    The stated name proves nothing. Raises InvalidSignatureError if the document is malformed or about another bundle.
    """
    if len(document) > LIMITS.signature:
        raise InvalidSignatureError(f"the signature has more than {LIMITS.signature} bytes")
    try:
        read = msgspec.json.decode(document, type=_Document)
        envelope = read.dsse_envelope
        if (read.media_type, envelope.payload_type) != (MEDIA_TYPE, PAYLOAD_TYPE):
            raise InvalidSignatureError("the signature is not a sigstore bundle of an in-toto statement")
        body = msgspec.json.decode(envelope.payload, type=_Statement)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidSignatureError(f"the signature is malformed: {error}") from error
    signed = {"sha256": digest.removeprefix("sha256:")}
    if (body.type, body.predicate_type) != (STATEMENT_TYPE, PREDICATE_TYPE) or body.subject[
        0
    ].digest != signed:
        raise InvalidSignatureError("the signature is about another bundle")
    data = pae(envelope.payload)
    signers = (
        name
        for name, key in keys.items()
        if any(_verifies(key, one.sig, data) for one in envelope.signatures)
    )
    return next(signers, None), body.predicate.signer if body.predicate else None


def _verifies(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except CryptographyMismatch:
        return False
    return True


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
