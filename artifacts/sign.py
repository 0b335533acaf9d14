"""Signatures of bundles: ed25519 over the digest of the image manifest, which contains all other digests.

A bundle is trusted when one of its signatures verifies under a public key in the trust directory. The host key is created on
first use and trusted on its own machine.

A signature is a sigstore bundle (v0.3) with a DSSE envelope of an in-toto statement, as `cosign sign --key` writes it. The
signed bytes are PAE = "DSSEv1 " + len(type) + " " + type + " " + len(body) + " " + body (the DSSE protocol, v1); the body
contains the digest of the manifest.
"""

from __future__ import annotations

import base64
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
    named_os_errors,
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

    private: Ed25519PrivateKey

    @property
    def fingerprint(self) -> str:
        """Return ed25519:<32 hex digits> of the public key."""
        return fingerprint(self.private.public_key())

    @property
    def public_pem(self) -> bytes:
        """Return the public key (PEM)."""
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def sign(self, digest: str) -> bytes:
        """Return the sigstore bundle over a manifest's digest, which cosign and other tools verify with `public_pem`."""
        body = statement(digest, self.fingerprint)
        # cosign's identifier of a key: the digest of its SubjectPublicKeyInfo.
        info = self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        document = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {
                "publicKey": {"hint": _b64(sha256(info).digest())},
                "tlogEntries": [],
            },
            "dsseEnvelope": {
                "payload": _b64(body),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _b64(self.private.sign(pae(body)))}],
            },
        }
        return canonical.dumps(document)


def fingerprint(public: Ed25519PublicKey) -> str:
    """Return ed25519:<first 32 hex digits of the sha256 of the raw public key>."""
    return f"{ALGORITHM}:{sha256(public.public_bytes_raw()).hexdigest()[:32]}"


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


def pae(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding, the signed bytes."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def host_key(state_dir: Path) -> HostKey:
    """Return the key in `state_dir`, created on first use and added to `trust_dir(state_dir)`.

    Raises ExposedKeyError for a key that others can read, own or replace, InvalidSignatureError for one that is not an ed25519
    key; ReadOnlyStoreError, NoSpaceError.
    """
    path = state_dir / "signing" / "host.pem"
    with named_os_errors(
        "creating the signing key", f"let this user write to {state_dir}, or set XDG_STATE_HOME"
    ):
        if not path.exists():
            pem = Ed25519PrivateKey.generate().private_bytes(
                Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            files.make_private(path.parent)
            files.create_once(path, pem, 0o600)
    require_unexposed(path, state_dir)
    key = read_key(path)
    trust(trust_dir(state_dir), key.public_pem, name="host")
    return key


def read_key(path: Path) -> HostKey:
    """Return the private key in a PEM file.

    Raises OSError, ExposedKeyError for a file that others can read, and InvalidSignatureError for another kind of key.
    """
    if path.stat().st_mode & 0o077:
        raise ExposedKeyError(f"{path} can be read by others", hint=f"chmod 600 {shlex.quote(str(path))}")
    try:
        private = serialization.load_pem_private_key(files.read_regular(path, LIMITS.signature), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidSignatureError(f"{path.name} is not a private key") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InvalidSignatureError(f"{path.name} is not an ed25519 key")
    return HostKey(private)


def trust_dir(state_dir: Path) -> Path:
    """Return the directory of the public keys that this user trusts."""
    return state_dir / "trust"


def public_pem(state_dir: Path) -> bytes:
    """Return the host's public key, which other hosts add in order to trust this host's bundles."""
    return host_key(state_dir).public_pem


def trust(directory: Path, pem: bytes, *, name: str, source: str | None = None) -> Path:
    """Add a public key (PEM) to the trust directory, as the file NAME-FINGERPRINT.pub. `source` is the key's name in errors.

    Raises InvalidNameError unless the name is a plain file name, InvalidSignatureError, ExposedKeyError for a directory that
    others can write to, ReadOnlyStoreError, NoSpaceError.
    """
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"invalid name {name[:200]!r} of a key: expected up to 64 letters, digits and . _ -, not . or - first"
        )
    mark = fingerprint(_load_public(pem, source or name)).removeprefix(f"{ALGORITHM}:")
    path = directory / f"{name}-{mark}.pub"
    require_unexposed(directory, directory.parent)
    with named_os_errors("trusting a key"):
        files.make_private(directory)
        if not path.exists():
            files.write_atomic(path, pem)
    return path


def read_trusted(path: Path, state_dir: Path) -> Ed25519PublicKey:
    """Return a key of the trust directory. Raises ExposedKeyError, InvalidSignatureError, NotRegularError and OSError."""
    require_unexposed(path, state_dir)
    return _load_public(files.read_regular(path, LIMITS.signature), path.name)


def _load_public(pem: bytes, name: str) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidSignatureError(
            f"{name} is not a public key in PEM", hint="remove or replace it"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidSignatureError(f"{name} is not an ed25519 key", hint="remove or replace it")
    return key


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Directory of *.pub files that no other user can change; call it with a bundle, or pass it to Bundle.extract."""

    directory: Path

    def __call__(self, bundle: Bundle) -> TrustResult:
        """Return whether a trusted key signed `bundle`.

        A bad signature raises no error: the result has the reason.
        """
        results = self.each(bundle)
        return next((one for one in results if one.ok), results[0] if results else _UNSIGNED)

    def each(self, bundle: Bundle) -> list[TrustResult]:
        """Return the result of every signature about `bundle`."""
        state = self.directory.parent
        require_unexposed(self.directory, state)
        trusted = [read_trusted(path, state) for path in sorted(self.directory.glob("*.pub"))]
        keys = {fingerprint(key): key for key in trusted}
        found = bundle.layout.signatures(bundle.descriptor)
        return [verify(document, bundle.digest, keys) for document in found]


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


def verify(document: bytes, digest: str, keys: Mapping[str, Ed25519PublicKey]) -> TrustResult:
    """Return whether one of `keys` signed the document about the manifest `digest`.

    The name of the signer in a document that no key verifies proves nothing.
    """
    if len(document) > LIMITS.signature:
        return TrustResult(False, None, f"the signature has more than {LIMITS.signature} bytes")
    try:
        read = msgspec.json.decode(document, type=_Document)
        envelope = read.dsse_envelope
        if (read.media_type, envelope.payload_type) != (MEDIA_TYPE, PAYLOAD_TYPE):
            return TrustResult(False, None, "the signature is not a sigstore bundle of an in-toto statement")
        body = msgspec.json.decode(envelope.payload, type=_Statement)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return TrustResult(False, None, f"the signature is malformed: {error}")
    said = (body.type, body.predicate_type, body.subject[0].digest)
    if said != (STATEMENT_TYPE, PREDICATE_TYPE, {"sha256": digest.removeprefix("sha256:")}):
        return TrustResult(False, None, "the signature is about another bundle")
    signed = pae(envelope.payload)
    for name, key in keys.items():
        if any(_verifies(key, one.sig, signed) for one in envelope.signatures):
            return TrustResult(True, name, f"signed by {name}")
    stated = body.predicate.signer if body.predicate else None
    if stated in keys:
        return TrustResult(False, stated, "the signature does not verify")
    if stated is None or not _FINGERPRINT.fullmatch(stated):
        return TrustResult(False, None, "its signer is not a trusted key")
    return TrustResult(False, stated, f"its signer {stated} is not a trusted key")


def _verifies(key: Ed25519PublicKey, signature: bytes, signed: bytes) -> bool:
    try:
        key.verify(signature, signed)
    except CryptographyMismatch:
        return False
    return True


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
