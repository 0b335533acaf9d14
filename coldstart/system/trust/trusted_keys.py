"""Keys whose bundles may run code here, including this machine's own key, and recorded verifications.

Keys are identified by the fingerprint of their content, never by their file name.

A bundle whose signature was verified with a key is trusted as long as the key is: the digest of a manifest covers the
complete bundle, and signatures do not expire. Verifications are recorded in the state directory, which does not move with
a cache. With such a record, a start need not import a cryptography library.
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
    """Public key in the trust directory. `problem` is the reason why it cannot be used, or None if it can."""

    file: str
    name: str
    fingerprint: str | None
    own: bool
    problem: str | None = None


def list_keys() -> list[TrustedKey]:
    """Return all trusted keys. This machine's own key is created on first use."""
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


def add_key(file: Path, name: str) -> TrustedKey:
    """Trust the public key in the PEM file `file` under the name `name`, and return it.

    Raises:
        InvalidNameError: `name` is not a plain name.
        UsageError: The file is not a small regular file that can be read.
        InvalidSignatureError: The file contains no public key.
    """
    from coldstart.artifacts import sign

    hint = "specify a public key, as this command prints it on the other machine: coldstart trust show"
    try:
        pem = files.read_regular(file, LIMITS.signature_bytes)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {describe_reason(error)}", hint=hint) from error
    try:
        added = sign.add_trusted_key(sign.trust_dir(paths.state_dir()), pem, name=name, source=str(file))
    except InvalidSignatureError as error:
        raise InvalidSignatureError(error.message, hint=hint) from error
    return next(key for key in list_keys() if key.file == added.name)


def remove_keys(query: str) -> list[TrustedKey]:
    """Stop trusting a key, under all names with which it was added.

    Args:
        query: Name, file or fingerprint of the key, or at least 12 hex digits of the fingerprint.

    Returns:
        The removed entries of the trust directory.

    Raises:
        UsageError: No key or several keys match, or the key is this machine's own.
        ReadOnlyStoreError: The trust directory is not writable.
    """
    keys = list_keys()
    matches = [key for key in keys if _matches(key, query)]
    marks = {key.fingerprint for key in matches if key.fingerprint}
    if not matches:
        raise UsageError(f"no trusted key matches {query!r}", hint="run `coldstart trust list`")
    if len(marks) > 1:
        raise UsageError(
            f"{query!r} matches several keys: {', '.join(sorted(marks))}",
            hint="run `coldstart trust remove FINGERPRINT`",
        )
    if any(key.own for key in matches):
        raise UsageError(
            f"{query!r} is this machine's own key, which signs the bundles built here",
            hint="run `coldstart trust list`, and specify another key",
        )
    removed = [key for key in keys if key in matches or key.fingerprint in marks]
    with translate_os_errors("removing a trusted key"):
        for key in removed:
            _find_key(key.file).unlink(missing_ok=True)
    return removed


def _matches(key: TrustedKey, query: str) -> bool:
    if query in (key.name, key.file, key.fingerprint):
        return True
    digits, mark = (text.rpartition(":")[2] for text in (query, key.fingerprint or ""))
    return bool(_DIGITS.fullmatch(digits)) and mark.startswith(digits)


def check_trust(bundle: Bundle) -> TrustResult:
    """Return whether a trusted key signed `bundle`.

    Raises InvalidSignatureError and ExposedKeyError for an invalid trusted key file.
    """
    record = paths.state_dir() / "verdicts" / bundle.digest.removeprefix("sha256:")
    # Without a usable record, the signature itself is verified.
    with suppress(OSError, ValueError, KeyError, TypeError, BundleError):
        known = canonical.read_json(record, max_bytes=LIMITS.signature_bytes)
        if _hash_key(known["key"]) == known["sha256"]:
            return TrustResult(True, known["signer"], f"signed by {known['signer']}")
    from coldstart.artifacts import sign  # cryptography

    trusted = sign.trust_dir(paths.state_dir())
    result = sign.TrustStore(trusted)(bundle)
    if result.is_trusted and result.signer and not is_dry_run():
        # Without a writable state directory, each start verifies the signature again.
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
