"""Who is trusted, remembered: a bundle whose signature once verified under a key is trusted as long as that key is.

A manifest's digest names all of a bundle, and a signature over it does not expire, so a verdict depends on nothing but the key
file in the trust directory. Verdicts lie beside it, in the state directory, which does not travel with a cache. They spare
each start the import of a cryptography library.
"""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.limits import LIMITS
from coldstart.system import paths


def judge(bundle: Bundle) -> TrustResult:
    """Whether a trusted key signed `bundle`. Raises InvalidSignatureError for a malformed key file among the trusted."""
    record = paths.state_dir() / "verdicts" / bundle.digest.removeprefix("sha256:")
    if known := _remembered(record):
        return known
    from coldstart.artifacts import sign  # cryptography

    result = sign.trusted(bundle, paths.state_dir() / "trust")
    if result.ok and result.signer:
        with suppress(OSError, BundleError):  # a state directory that cannot be written costs time only
            _remember(record, result.signer)
    return result


def _remembered(record: Path) -> TrustResult | None:
    try:
        verdict = json.loads(files.read_capped(record, LIMITS.signature))
        if _digest_of(verdict["key"]) == verdict["sha256"]:
            return TrustResult(True, verdict["signer"], f"signed by {verdict['signer']}")
    except (OSError, ValueError, KeyError, TypeError, BundleError):
        pass  # Whatever is wrong with it, the signature itself is asked then.
    return None


def _remember(record: Path, signer: str) -> None:
    mark = signer.partition(":")[2]
    for path in sorted((paths.state_dir() / "trust").glob(f"*-{mark}.pub")):
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({"signer": signer, "key": path.name, "sha256": _digest_of(path.name)})
        files.write_atomic(record, text.encode(), mode=0o600)
        return


def _digest_of(name: str) -> str:
    path = paths.state_dir() / "trust" / Path(name).name
    return sha256(files.read_capped(path, LIMITS.signature)).hexdigest()
