"""Detect secrets and remove them from everything that is shown, logged or stored. Read API keys from files.

Invariant: no result of this module contains the value of a secret option, JSON field or environment variable, or the
credentials and query values of a URL. Words in a name determine whether it is secret, so options that vLLM adds later are
covered, too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coldstart.artifacts.files import read_regular
from coldstart.artifacts.net.origin import redact_url
from coldstart.errors import UsageError, describe_reason

HIDDEN = "***"
# vLLM's own secret options, whatever the rule by words decides. A test compares them with vLLM's parser.
OPTIONS = frozenset({"api_key", "hf_token"})
# The patterns are strings, which `re` compiles on first use and caches: most commands, and completion, use none of them.
# The words end the name or precede a word for the secret's location: "token" is secret, "token_threshold" is not.
_WORDS = (
    r"(?i)(?:^|[._\-])(?:"
    r"(?:api|access|account|private|signing|encryption|master|shared|license|service)[_\-]?keys?(?:[_\-]?id)?"
    r"|\w*tokens?|\w*secrets?(?:[_\-]\w+)?|\w*passw(?:or)?ds?|passphrase|pass|pwd|pat|cookies?|bearer|dsn"
    r"|(?<!allow_)credentials?(?:[_\-]\w+)?|auth|authorization|sas|signature|jwt|webhook(?:[_\-]url)?"
    r"|connection[_\-]string|kubeconfig"
    r")$"
)
# Counts of a language model's tokens, and properties of a tokenizer, in which "token" has another meaning.
_COUNTS = (
    r"(?i)(?:^|_)(?:max|min|num|batched|scheduled|queued|spec|stop|return|prompt|tokenizer|details|image|special|added|eos|bos|pad|unk)"
    r"(?:_\w+)?_tokens?$|^(?:spec|special|added)_tokens?$|^tokenizer"
)
# Plurals and rates count a language model's tokens if their values are numbers.
_FIGURES = r"(?i)tokens$|_per_(?:\w+_)?token$"
# The scheme is bounded, because the search would otherwise take quadratic time for a line without spaces.
_URL = r"[A-Za-z][A-Za-z0-9+.\-]{0,30}://[^\s\"'<>]+"
_HEADER = r"(?i)\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}"
# A JSON web token, after other characters of its word. The lookahead reads each word once: a word with many `eyJ` and
# without points would otherwise take the square of its length.
_JOSE = (
    r"(?<![A-Za-z0-9_\-])(?=[A-Za-z0-9_\-]{11,}\.[A-Za-z0-9_\-]{8,}\.)([A-Za-z0-9_\-]*?)"
    r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*"
)
# Other values that are secret under any name: Hugging Face, AWS, GitHub, OpenAI-like, a PEM key.
_FORMS = (
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bsk-[A-Za-z0-9_\-]{16,}|\bxox[abprs]-[A-Za-z0-9\-]{10,}|\bglpat-[A-Za-z0-9_\-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
# Shorter values could occur in ordinary text, which would then be hidden.
_SHORTEST = 6


def is_secret_name(name: str) -> bool:
    """Return whether an option, variable or field with this name is secret. Options may be abbreviated, as in argparse."""
    plain = name.lstrip("-").replace("-", "_")
    last = plain.rpartition(".")[2].lower()
    if last in OPTIONS or (len(plain) > 3 and any(option.startswith(plain.lower()) for option in OPTIONS)):
        return True
    return bool(re.search(_WORDS, last)) and not re.search(_COUNTS, last)


def redact_arguments(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the values of secret options replaced with HIDDEN, and with secrets in other arguments redacted."""
    shown: list[str] = []
    hidden = False
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            hidden = is_secret_name(flag)
            shown.append(f"{flag}={HIDDEN if hidden else _mask_word(value)}" if equals else flag)
        else:
            shown.append(HIDDEN if hidden else _mask_word(word))
    return shown


def drop_secret_options(argv: Sequence[str]) -> list[str]:
    """Return `argv` without options that contain secrets, because templates and snapshots must not hold secrets in memory."""
    options: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
            options.append([])
        options[-1].append(word)
    return [word for option in options if redact_arguments(option) == option for word in option]


def redact_document(value: object) -> object:
    """Return a JSON value with secret fields replaced with HIDDEN, and with secrets in its strings redacted."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if item and is_secret_name(str(key)) and not (re.search(_FIGURES, str(key)) and _is_figure(item))
            else redact_document(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_document(item) for item in value]
    return redact_text(value) if isinstance(value, str) else value


def _is_figure(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_figure, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_figure, value))
    return isinstance(value, int | float)


def redact_text(message: str, environment: Mapping[str, str] | None = None) -> str:
    """Return `message` without URL credentials, query values, known token formats, and values of secret variables."""
    given = os.environ if environment is None else environment
    # A path is the location of a secret, not the secret, and an error message needs it.
    secret_values = {
        value
        for name, value in given.items()
        if len(value) >= _SHORTEST and is_secret_name(name) and not value.startswith(("/", "~", "./"))
    }
    for value in sorted(secret_values, key=len, reverse=True):  # one value may contain another
        message = message.replace(value, HIDDEN)
    message = re.sub(_URL, lambda match: redact_query(match[0]), message)
    message = re.sub(_HEADER, lambda match: f"{match[1]} {HIDDEN}", message)
    message = re.sub(_JOSE, rf"\g<1>{HIDDEN}", message)
    return re.sub(_FORMS, HIDDEN, message)


def redact_query(address: str) -> str:
    """Return `address` without user and password, and with query values hidden: a presigned URL is a credential."""
    shown, query = redact_url(address), address.partition("?")[2]
    if not query:
        return shown
    names = (part.partition("=") for part in query.partition("#")[0].split("&"))
    return f"{shown}?{'&'.join(f'{name}={HIDDEN}' if equals else HIDDEN for name, equals, _ in names)}"


def select_harmless(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the variables in `names` that are set and not secret, either by name or by the format of their value."""
    chosen = {name: environment[name] for name in names if name in environment and not is_secret_name(name)}
    return {name: value for name, value in chosen.items() if redact_text(value, environment) == value}


def _mask_word(word: str) -> str:
    if word[:1] not in "{[" or not word:
        return redact_text(word)
    try:
        given = json.loads(word)
    except ValueError:
        return redact_text(word)
    shown = redact_document(given)
    return word if shown == given else json.dumps(shown)


_KEY_CAP = 16 << 10


def normalize_scheme(authorization: bytes) -> bytes:
    """Return the value of an `Authorization` header with the scheme as `Bearer`, whose case is free (RFC 9110, 11.1)."""
    return b"Bearer " + authorization[7:] if authorization[:7].lower() == b"bearer " else authorization


def read_key(file: Path) -> str:
    """Read an API key from a file, and strip surrounding whitespace.

    Raises:
        UsageError: The file cannot be read, or contains anything but one line of printable ASCII.
    """
    try:
        key = read_regular(file, _KEY_CAP).decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    except (OSError, ValueError) as error:
        name, hint = shlex.quote(str(file)), "specify a key file"
        if isinstance(error, FileNotFoundError):
            hint = f"create a key: install -m 600 /dev/null {name} && openssl rand -hex 32 > {name}"
        raise UsageError(f"cannot read {file}: {describe_reason(error)}", hint=hint) from error
    if not key or not key.isprintable():
        raise UsageError(
            f"cannot read a key from {file}: expected one line of ASCII",
            hint="store only the key in the file",
        )
    return key


def describe_exposure(file: Path) -> str | None:
    """Return a warning if other users can read a secret file, or else None."""
    try:
        exposed = file.stat().st_mode & stat.S_IROTH
    except OSError:
        return None
    return (
        f"other users can read {file} (hint: run `chmod 600 {shlex.quote(str(file))}`)" if exposed else None
    )
