"""Cache of signature verifications: a bundle whose signature was verified with a key is trusted as long as the key is.

A manifest's digest covers the complete bundle, and a signature over it does not expire, so the result depends only on the key
file in the trust directory. Results are stored beside it in the state directory, which does not travel with a cache. They save
each start the import of a cryptography library.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from coldstart.artifacts import canonical, files, ownership
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.limits import LIMITS
from coldstart.system import paths
from coldstart.system.dry_run import is_dry_run


def judge(bundle: Bundle) -> TrustResult:
    """Return whether a trusted key signed `bundle`. Raises InvalidSignatureError and ExposedKeyError for a trusted key file."""
    record = paths.state_dir() / "verdicts" / bundle.digest.removeprefix("sha256:")
    if known := _remembered(record):
        return known
    from coldstart.artifacts import sign  # cryptography

    result = sign.TrustStore(sign.trust_dir(paths.state_dir()))(bundle)
    if result.ok and result.signer and not is_dry_run():
        with suppress(OSError, BundleError):  # without a writable state directory, each start verifies again
            _remember(record, result.signer)
    return result


def _remembered(record: Path) -> TrustResult | None:
    try:
        verdict = canonical.read(record, cap=LIMITS.signature)
        if _digest_of(verdict["key"]) == verdict["sha256"]:
            return TrustResult(True, verdict["signer"], f"signed by {verdict['signer']}")
    except (OSError, ValueError, KeyError, TypeError, BundleError):
        pass  # The caller then verifies the signature itself.
    return None


def _remember(record: Path, signer: str) -> None:
    mark = signer.partition(":")[2]
    for path in sorted((paths.state_dir() / "trust").glob(f"*-{mark}.pub")):
        files.make_private(record.parent)
        text = json.dumps({"signer": signer, "key": path.name, "sha256": _digest_of(path.name)})
        files.write_atomic(record, text.encode(), mode=0o600)
        return


def _digest_of(name: str) -> str:
    path = paths.state_dir() / "trust" / Path(name).name
    ownership.require_unexposed(path, paths.state_dir())
    return sha256(files.read_regular(path, LIMITS.signature)).hexdigest()
