"""Signatures of bundles: ed25519 over the digest of the image manifest, which contains all other digests.

A bundle is trusted if one of its signatures verifies with a public key in the trust directory. A machine's own key is
created on first use and trusted on that machine.

A signature is a sigstore bundle (v0.3) with a DSSE envelope of an in-toto statement, as `cosign sign --key` writes it.
The signed bytes are PAE = "DSSEv1 " + len(type) + " " + type + " " + len(body) + " " + body (the DSSE protocol, v1); the
body contains the digest of the manifest.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from coldstart.artifacts import canonical, files
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import (
    ExposedKeyError,
    InvalidNameError,
    InvalidSignatureError,
    translate_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.ownership import require_unexposed
from cryptography.exceptions import InvalidSignature as CryptographyMismatch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ALGORITHM = "ed25519"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://sigstore.dev/cosign/sign/v1"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_FINGERPRINT = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")
_UNSIGNED = TrustResult(False, None, "the bundle is not signed")


@dataclass(frozen=True, slots=True)
class HostKey:
    """Private key that signs the bundles of this machine."""

    private_key: Ed25519PrivateKey

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the public key as ed25519:<32 hex digits>."""
        return fingerprint(self.private_key.public_key())

    @property
    def public_pem(self) -> bytes:
        """Return the public key in PEM format, which other machines add in order to trust the bundles of this machine."""
        return self.private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, digest: str) -> bytes:
        """Return a sigstore bundle that signs a manifest's digest. cosign and other tools verify it with `public_pem`."""
        body = build_statement(digest, self.fingerprint)
        # cosign identifies a key by the digest of its SubjectPublicKeyInfo.
        info = self.private_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        document = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {
                "publicKey": {"hint": _encode_base64(sha256(info).digest())},
                "tlogEntries": [],
            },
            "dsseEnvelope": {
                "payload": _encode_base64(body),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _encode_base64(self.private_key.sign(encode_pae(body)))}],
            },
        }
        return canonical.serialize(document)


def fingerprint(public: Ed25519PublicKey) -> str:
    """Return ed25519: and the first 32 hex digits of the SHA-256 digest of the raw public key."""
    return f"{ALGORITHM}:{sha256(public.public_bytes_raw()).hexdigest()[:32]}"


def build_statement(digest: str, signer: str | None = None) -> bytes:
    """Build the in-toto statement about the manifest `digest` (sha256:<hex>).

    `signer` identifies the key to readers that do not have it.
    """
    return canonical.serialize(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"signer": signer} if signer else {},
        }
    )


def encode_pae(payload: bytes) -> bytes:
    """Return the DSSE pre-authentication encoding of `payload`. A signature covers these bytes."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def load_host_key(state_dir: Path) -> HostKey:
    """Load this machine's signing key. On first use, create it in `state_dir` and add it to the trust directory.

    Raises ExposedKeyError if other users can read, own or replace it, InvalidSignatureError if it is not an ed25519 key,
    ReadOnlyStoreError, NoSpaceError.
    """
    path = state_dir / "signing" / "host.pem"
    with translate_os_errors("creating the signing key", f"make {state_dir} writable, or set XDG_STATE_HOME"):
        if not path.exists():
            pem = Ed25519PrivateKey.generate().private_bytes(
                Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            files.create_private_directory(path.parent)
            with files.hold_lock(path.with_name(f".{path.name}.lock")):  # only the first process writes
                if not os.path.lexists(path):
                    files.write_atomic(path, pem, mode=0o600)
    require_unexposed(path, state_dir)
    key = read_key(path)
    add_trusted_key(trust_dir(state_dir), key.public_pem, name="host")
    return key


def read_key(path: Path) -> HostKey:
    """Read a private key from a PEM file.

    Raises OSError, ExposedKeyError if other users can read the file, and InvalidSignatureError if it is not an ed25519
    key.
    """
    if path.stat().st_mode & 0o077:
        raise ExposedKeyError(
            f"other users can read {path}", hint=f"run `chmod 600 {shlex.quote(str(path))}`"
        )
    try:
        private = serialization.load_pem_private_key(files.read_regular(path, LIMITS.signature_bytes), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidSignatureError(f"{path.name} is not a private key in PEM format") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InvalidSignatureError(f"{path.name} is not an ed25519 key")
    return HostKey(private)


def trust_dir(state_dir: Path) -> Path:
    """Return the directory of the public keys that this user trusts."""
    return state_dir / "trust"


def add_trusted_key(directory: Path, pem: bytes, *, name: str, source: str | None = None) -> Path:
    """Add a public key (PEM) to the trust directory as NAME-FINGERPRINT.pub, and return its path.

    `source` names the key in error messages. Raises InvalidNameError unless `name` is a plain file name,
    InvalidSignatureError, ExposedKeyError if other users can write to the directory, ReadOnlyStoreError, NoSpaceError.
    """
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"invalid key name {name[:200]!r}: expected up to 64 letters, digits, '.', '_' or '-', not starting with '.' or '-'"
        )
    digits = fingerprint(_load_public(pem, source or name)).removeprefix(f"{ALGORITHM}:")
    path = directory / f"{name}-{digits}.pub"
    require_unexposed(directory, directory.parent)
    with translate_os_errors("trusting a key"):
        files.create_private_directory(directory)
        if not path.exists():
            files.write_atomic(path, pem)
    return path


def read_trusted(path: Path, state_dir: Path) -> Ed25519PublicKey:
    """Read a key in the trust directory. Raises ExposedKeyError, InvalidSignatureError, NotRegularError and OSError."""
    require_unexposed(path, state_dir)
    return _load_public(files.read_regular(path, LIMITS.signature_bytes), path.name)


def _load_public(pem: bytes, name: str) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidSignatureError(
            f"{name} is not a public key in PEM format", hint="remove or replace the key file"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidSignatureError(f"{name} is not an ed25519 key", hint="remove or replace the key file")
    return key


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Directory of *.pub files that no other user can change. An instance is a trust check for Bundle.extract_section."""

    directory: Path

    def __call__(self, bundle: Bundle) -> TrustResult:
        """Return whether a trusted key signed `bundle`. An invalid signature raises no error; the result has the reason."""
        results = self.verify_signatures(bundle)
        return next((one for one in results if one.is_trusted), results[0] if results else _UNSIGNED)

    def verify_signatures(self, bundle: Bundle) -> list[TrustResult]:
        """Check each signature of `bundle` against the trusted keys and return one result for each."""
        state = self.directory.parent
        require_unexposed(self.directory, state)
        trusted = [read_trusted(path, state) for path in sorted(self.directory.glob("*.pub"))]
        keys = {fingerprint(key): key for key in trusted}
        documents = bundle.layout.read_signatures(bundle.descriptor)
        return [verify_signature(document, bundle.digest, keys) for document in documents]


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


def verify_signature(document: bytes, digest: str, keys: Mapping[str, Ed25519PublicKey]) -> TrustResult:
    """Check whether one of `keys` signed the document about the manifest `digest`, and return the result.

    If no key verifies the document, the signer's name in the result cannot be trusted.
    """
    if len(document) > LIMITS.signature_bytes:
        return TrustResult(False, None, f"the signature is larger than {LIMITS.signature_bytes} bytes")
    try:
        read = msgspec.json.decode(document, type=_Document)
        envelope = read.dsse_envelope
        if (read.media_type, envelope.payload_type) != (MEDIA_TYPE, PAYLOAD_TYPE):
            return TrustResult(False, None, "the signature is not a sigstore bundle of an in-toto statement")
        body = msgspec.json.decode(envelope.payload, type=_Statement)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return TrustResult(False, None, f"the signature is malformed: {error}")
    stated = (body.type, body.predicate_type, body.subject[0].digest)
    if stated != (STATEMENT_TYPE, PREDICATE_TYPE, {"sha256": digest.removeprefix("sha256:")}):
        return TrustResult(False, None, "the signature covers another bundle")
    signed = encode_pae(envelope.payload)
    for name, key in keys.items():
        if any(_is_valid(key, one.sig, signed) for one in envelope.signatures):
            return TrustResult(True, name, f"signed by {name}")
    signer = body.predicate.signer if body.predicate else None
    if signer in keys:
        return TrustResult(False, signer, "the signature is invalid")
    if signer is None or not _FINGERPRINT.fullmatch(signer):
        return TrustResult(False, None, "the signing key is not trusted")
    return TrustResult(False, signer, f"the signing key {signer} is not trusted")


def _is_valid(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except CryptographyMismatch:
        return False
    return True


def _encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
