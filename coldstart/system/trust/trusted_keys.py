"""Keys whose bundles may run code here: a directory of public keys, including this machine's own; and what they signed.

Invariant: a key is listed by the fingerprint of its content, never by its file name.

A bundle whose signature was verified with a key is trusted as long as the key is: a manifest's digest covers the complete
bundle, and a signature over it does not expire. Verifications are recorded in the state directory, which does not travel with a
cache. They save each start the import of a cryptography library.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from coldstart.artifacts import canonical, files
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import BundleError, InvalidSignatureError, translate_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.ownership import require_unexposed
from coldstart.errors import UsageError, describe_reason
from coldstart.system import paths
from coldstart.system.dry_run import is_dry_run

_DIGITS = re.compile(r"[0-9a-f]{12,32}")


@dataclass(frozen=True)
class TrustedKey:
    """One public key of the trust directory; ``problem`` is the reason why it cannot be used, if any."""

    file: str
    name: str
    fingerprint: str | None
    own: bool
    problem: str | None = None


def listed() -> list[TrustedKey]:
    """Return every trusted key. This machine's own key is created on first use."""
    from coldstart.artifacts import sign  # cryptography

    state = paths.state_dir()
    own = sign.load_host_key(state).fingerprint
    require_unexposed(sign.trust_dir(state), state)
    keys = []
    for path in sorted(sign.trust_dir(state).glob("*.pub")):
        try:
            mark = sign.fingerprint(sign.read_trusted(path, state))
        except (OSError, ValueError, BundleError) as error:
            keys.append(TrustedKey(path.name, path.stem, None, False, describe_reason(error)))
            continue
        name = path.stem.removesuffix(f"-{mark.partition(':')[2]}")
        keys.append(TrustedKey(path.name, name, mark, mark == own))
    return keys


def add(file: Path, name: str) -> TrustedKey:
    """Trust the public key (PEM) in ``file``.

    Raises:
        InvalidNameError: `name` is not a plain name.
        UsageError: the file is not a small regular file that can be read.
        InvalidSignatureError: the file holds no public key.
    """
    from coldstart.artifacts import sign

    hint = "specify a public key, as printed on the other machine by: coldstart trust show"
    try:
        pem = files.read_regular(file, LIMITS.signature_bytes)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {describe_reason(error)}", hint=hint) from error
    try:
        added = sign.add_trusted_key(sign.trust_dir(paths.state_dir()), pem, name=name, source=str(file))
    except InvalidSignatureError as error:
        raise InvalidSignatureError(error.message, hint=hint) from error
    return next(key for key in listed() if key.file == added.name)


def remove(word: str) -> list[TrustedKey]:
    """Stop trusting a key, whatever names it was added under.

    Args:
        word: Its name or file, its fingerprint, or 12 or more digits of the fingerprint.

    Returns:
        The entries of the trust directory that were removed.

    Raises:
        UsageError: no key or several keys are called so, or it is this machine's own.
        ReadOnlyStoreError: the trust directory cannot be written.
    """
    keys = listed()
    called = [key for key in keys if _is_called(key, word)]
    marks = {key.fingerprint for key in called if key.fingerprint}
    if not called:
        raise UsageError(f"no trusted key is called {word!r}", hint="coldstart trust list")
    if len(marks) > 1:
        raise UsageError(
            f"{word!r} names several keys: {', '.join(sorted(marks))}",
            hint="coldstart trust remove FINGERPRINT",
        )
    if any(key.own for key in called):
        raise UsageError(
            f"{word!r} is this machine's own key, which signs the bundles built here",
            hint="use another key: coldstart trust list",
        )
    doomed = [key for key in keys if key in called or key.fingerprint in marks]
    with translate_os_errors("removing a trusted key"):
        for key in doomed:
            _find_key(key.file).unlink(missing_ok=True)
    return doomed


def _is_called(key: TrustedKey, word: str) -> bool:
    if word in (key.name, key.file, key.fingerprint):
        return True
    digits, mark = (text.rpartition(":")[2] for text in (word, key.fingerprint or ""))
    return bool(_DIGITS.fullmatch(digits)) and mark.startswith(digits)


def judge(bundle: Bundle) -> TrustResult:
    """Return whether a trusted key signed `bundle`. Raises InvalidSignatureError and ExposedKeyError for a trusted key file."""
    record = paths.state_dir() / "verdicts" / bundle.digest.removeprefix("sha256:")
    # Without a usable record the signature itself is verified.
    with suppress(OSError, ValueError, KeyError, TypeError, BundleError):
        known = canonical.read_json(record, max_bytes=LIMITS.signature_bytes)
        if _hash_key(known["key"]) == known["sha256"]:
            return TrustResult(True, known["signer"], f"signed by {known['signer']}")
    from coldstart.artifacts import sign  # cryptography

    trusted = sign.trust_dir(paths.state_dir())
    result = sign.TrustStore(trusted)(bundle)
    if result.ok and result.signer and not is_dry_run():
        # Without a writable state directory each start verifies again.
        with suppress(OSError, ValueError, BundleError):
            key = min(trusted.glob(f"*-{result.signer.partition(':')[2]}.pub")).name
            files.create_private_directory(record.parent)
            text = json.dumps({"signer": result.signer, "key": key, "sha256": _hash_key(key)})
            files.write_atomic(record, text.encode(), mode=0o600)
    return result


def _find_key(name: str) -> Path:
    return paths.state_dir() / "trust" / Path(name).name


def _hash_key(name: str) -> str:
    require_unexposed(path := _find_key(name), paths.state_dir())
    return sha256(files.read_regular(path, LIMITS.signature_bytes)).hexdigest()
