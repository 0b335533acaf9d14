"""Messages that move the KV of a running request from one server to another (ParaServe, section 6.2).

The messages travel as the request parameter `kv_transfer_params` of vLLM. Invariant: a server obeys only messages that are
signed with its own handover key, which no client knows. So a client can neither read the KV of another request nor
put KV of its own choice into a server's prefix cache.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

PARAMETER = "kv_transfer_params"
_MESSAGE, _SIGNATURE = "coldstart", "coldstart_signature"
MOST_BYTES = 1 << 16


class HandoverError(ValueError):
    """A message is not signed with the server's key, or is not a message of this protocol."""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pin"):
    """Hold the KV of the running request whose external id is `request`.

    Its first `tokens` token ids have the digest `digest`; the request is refused if they differ.
    """

    request: str
    tokens: int
    digest: str


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pull"):
    """Fetch the KV of `tokens` tokens, which the source holds as `pin` until its lease ends.

    `ranks` are the addresses of the source's data ports, one for each pipeline rank. `secret` authenticates the
    connections to them in both directions. `shape` is equal for servers that can exchange KV.
    """

    pin: str
    secret: str
    tokens: int
    shape: str
    ranks: tuple[tuple[str, int], ...]


Message = Pin | Pull


def sign(key: str, message: Message) -> dict[str, str]:
    """Return the value of `kv_transfer_params` that carries `message` to the server with the handover key `key`."""
    text = msgspec.json.encode(message).decode()
    return {_MESSAGE: text, _SIGNATURE: _signature(key, text)}


def read(key: str, parameters: Mapping[str, Any] | None) -> Message | None:
    """Return the message in a request's `kv_transfer_params`; None if they contain none.

    Raises:
        HandoverError: The message is not signed with `key`, is too long, or cannot be decoded.
    """
    text = (parameters or {}).get(_MESSAGE)
    if text is None:
        return None
    signature = (parameters or {}).get(_SIGNATURE)
    if not isinstance(text, str) or len(text) > MOST_BYTES or not isinstance(signature, str):
        raise HandoverError("the message has a wrong form")
    if not key or not hmac.compare_digest(signature.encode(), _signature(key, text).encode()):
        raise HandoverError("the message is not signed with the key of this server")
    try:
        message: Message = msgspec.json.decode(text, type=Message)
    except ValueError as error:  # of msgspec, or of text that cannot be encoded
        raise HandoverError(f"the message cannot be decoded: {error}") from error
    return message


def digest_tokens(tokens: Iterable[int]) -> str:
    """Return a SHA-256 of token ids, in hexadecimal digits."""
    return hashlib.sha256(b"".join(token.to_bytes(8, "little") for token in tokens)).hexdigest()


def _signature(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()
