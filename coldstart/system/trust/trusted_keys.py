"""Whose bundles may run code here: a directory of public keys, this machine's own among them.

Invariant: a key is listed by the fingerprint of its content, never by what its file is called.
"""

from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coldstart.artifacts import selection, sign
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from coldstart.errors import UsageError
from coldstart.system import paths


@dataclass(frozen=True)
class TrustedKey:
    """One public key of the trust directory; ``problem`` says why it cannot be used, if it cannot."""

    file: str
    fingerprint: str | None
    own: bool
    problem: str | None = None


def listed() -> list[TrustedKey]:
    """Every key that is trusted here; this machine's own is made on first use."""
    state = paths.state_dir()
    own = sign.host_key(state).fingerprint
    return [_read(path, own) for path in sorted(sign.trust_dir(state).glob("*.pub"))]


def add(file: Path, name: str) -> TrustedKey:
    """Trust the public key (PEM) in ``file``. Raises UsageError if unreadable, InvalidSignatureError if no key."""
    state = paths.state_dir()
    try:
        pem = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}.", hint="on the other machine: coldstart trust show"
        ) from error
    return _read(sign.trust(sign.trust_dir(state), pem, name=name), sign.host_key(state).fingerprint)


@dataclass(frozen=True)
class Verdict:
    """On a bundle: the sum, one verdict for each signature, the bundle of its key that is taken, and what to do."""

    trust: TrustResult
    signatures: list[TrustResult]
    taken: Bundle | None
    hint: str | None


def why(store: Store, bundle: Bundle) -> Verdict:
    """Why `bundle` is trusted or not, and which of its key is taken. Raises InvalidSignatureError for a malformed key file."""
    judge = sign.TrustStore(sign.trust_dir(paths.state_dir()))
    signatures, total = judge.each(bundle), judge(bundle)
    same = [other for other in store.list() if _key_of(other) == bundle.key_digest]
    best = next((one for one in selection.best_first(same, judge) if one.trust.ok), None)
    hint = None
    if not total.ok and signatures:
        hint = "if you know its maker: coldstart trust add FILE, with what this prints there: coldstart trust show"
    elif not total.ok:
        hint = "have its maker sign it, or make it here: coldstart materialize MODEL"
    return Verdict(total, signatures, best.bundle if best else None, hint)


def _key_of(bundle: Bundle) -> str | None:
    try:
        return bundle.key_digest
    except BundleError:
        return None


def own_public_key() -> str:
    """This machine's public key (PEM), for others to add."""
    return sign.public_pem(paths.state_dir()).decode()


def _read(path: Path, own: str) -> TrustedKey:
    try:
        public = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return TrustedKey(path.name, None, False, f"no public key in PEM: {error}")
    if not isinstance(public, Ed25519PublicKey):
        return TrustedKey(path.name, None, False, "no ed25519 key")
    mark = sign.fingerprint(public)
    return TrustedKey(path.name, mark, mark == own)
