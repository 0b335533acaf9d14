"""Keys whose bundles may run code here: a directory of public keys, including this machine's own.

Invariant: a key is listed by the fingerprint of its content, never by its file name.
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
    """One public key of the trust directory; ``problem`` is the reason why it cannot be used, if any."""

    file: str
    fingerprint: str | None
    own: bool
    problem: str | None = None


def listed() -> list[TrustedKey]:
    """Return every trusted key. This machine's own key is created on first use."""
    state = paths.state_dir()
    own = sign.host_key(state).fingerprint
    return [_read(path, own) for path in sorted(sign.trust_dir(state).glob("*.pub"))]


def add(file: Path, name: str) -> TrustedKey:
    """Trust the public key (PEM) in ``file``. Raises UsageError for an unreadable file, InvalidSignatureError for no key."""
    state = paths.state_dir()
    try:
        pem = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read {file}: {error.strerror}.", hint="run on the other machine: coldstart trust show"
        ) from error
    return _read(sign.trust(sign.trust_dir(state), pem, name=name), sign.host_key(state).fingerprint)


@dataclass(frozen=True)
class Verdict:
    """Trust in a bundle: the total, the result for each signature, the bundle that a start would use, and a hint."""

    trust: TrustResult
    signatures: list[TrustResult]
    taken: Bundle | None
    hint: str | None


def why(store: Store, bundle: Bundle) -> Verdict:
    """Explain whether `bundle` is trusted, and which of its key is used. Raises InvalidSignatureError for a bad key file."""
    judge = sign.TrustStore(sign.trust_dir(paths.state_dir()))
    signatures, total = judge.each(bundle), judge(bundle)
    same = [other for other in store.list() if _key_of(other) == bundle.key_digest]
    best = next((one for one in selection.best_first(same, judge) if one.trust.ok), None)
    hint = None
    if not total.ok and signatures:
        hint = "if you know its maker: coldstart trust add FILE, with the output on its machine of: coldstart trust show"
    elif not total.ok:
        hint = "ask its maker to sign it, or build it here: coldstart materialize MODEL"
    return Verdict(total, signatures, best.bundle if best else None, hint)


def _key_of(bundle: Bundle) -> str | None:
    try:
        return bundle.key_digest
    except BundleError:
        return None


def own_public_key() -> str:
    """Return this machine's public key (PEM), for other machines to add."""
    return sign.public_pem(paths.state_dir()).decode()


def _read(path: Path, own: str) -> TrustedKey:
    try:
        public = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        return TrustedKey(path.name, None, False, f"not a public key in PEM: {error}")
    if not isinstance(public, Ed25519PublicKey):
        return TrustedKey(path.name, None, False, "not an ed25519 key")
    mark = sign.fingerprint(public)
    return TrustedKey(path.name, mark, mark == own)
