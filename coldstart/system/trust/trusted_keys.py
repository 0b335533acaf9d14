"""Keys whose bundles may run code here: a directory of public keys, including this machine's own.

Invariant: a key is listed by the fingerprint of its content, never by its file name.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import files, sign
from coldstart.artifacts.errors import BundleError, InvalidSignatureError, named_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.ownership import require_unexposed
from coldstart.errors import UsageError, describe
from coldstart.system import paths

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
    state = paths.state_dir()
    own = sign.host_key(state).fingerprint
    require_unexposed(sign.trust_dir(state), state)
    return [_read(path, own) for path in sorted(sign.trust_dir(state).glob("*.pub"))]


def add(file: Path, name: str) -> TrustedKey:
    """Trust the public key (PEM) in ``file``.

    Raises:
        InvalidNameError: `name` is not a plain name.
        UsageError: the file is not a small regular file that can be read.
        InvalidSignatureError: the file holds no public key.
    """
    state = paths.state_dir()
    hint = "specify a public key, as printed on the other machine by: coldstart trust show"
    try:
        pem = files.read_regular(file, LIMITS.signature)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {describe(error)}", hint=hint) from error
    try:
        added = sign.trust(sign.trust_dir(state), pem, name=name, source=str(file))
    except InvalidSignatureError as error:
        raise InvalidSignatureError(error.message, hint=hint) from error
    return _read(added, sign.host_key(state).fingerprint)


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
    with named_os_errors("removing a trusted key"):
        for key in doomed:
            (sign.trust_dir(paths.state_dir()) / key.file).unlink(missing_ok=True)
    return doomed


def _is_called(key: TrustedKey, word: str) -> bool:
    if word in (key.name, key.file, key.fingerprint):
        return True
    digits = word.removeprefix(f"{sign.ALGORITHM}:")
    mark = (key.fingerprint or "").removeprefix(f"{sign.ALGORITHM}:")
    return bool(_DIGITS.fullmatch(digits)) and mark.startswith(digits)


def _read(path: Path, own: str) -> TrustedKey:
    try:
        public = sign.read_trusted(path, paths.state_dir())
    except (OSError, ValueError, BundleError) as error:
        return TrustedKey(path.name, path.stem, None, False, describe(error))
    mark = sign.fingerprint(public)
    name = path.stem.removesuffix(f"-{mark.removeprefix(f'{sign.ALGORITHM}:')}")
    return TrustedKey(path.name, name, mark, mark == own)
