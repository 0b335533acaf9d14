"""Signed messages that migrate the KV cache of a running request between servers (ParaServe, section 6.2).

vLLM's request parameter `kv_transfer_params` carries the messages. Invariant: a server accepts only messages that are
signed with its own handover key, which clients do not have. A client can therefore neither read the KV cache of another
request nor insert KV blocks into a server's prefix cache.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

PARAMETER = "kv_transfer_params"
_MESSAGE, _SIGNATURE = "coldstart", "coldstart_signature"
MAX_MESSAGE_BYTES = 1 << 16


class HandoverError(ValueError):
    """Error for a handover message that is malformed or has a wrong signature."""


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pin"):
    """Request to retain the KV cache of the running request with the external ID `request`.

    `digest` is the digest of the first `tokens` token IDs of that request. The server rejects the message if they differ.
    With `at_end`, the server retains what the request has when it ends, which may be after the response to this message.
    """

    request: str
    tokens: int
    digest: str
    at_end: bool = False


class Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="pull"):
    """Request to fetch the KV cache of at most `tokens` tokens, which the source retains as `pin` until its lease ends.

    `ranks` contains the (host, port) of the source's data port for each pipeline rank. `secret` authenticates both ends
    of these connections. `shape` identifies the KV layout, which must be equal on both servers.
    """

    pin: str
    secret: str
    tokens: int
    shape: str
    ranks: tuple[tuple[str, int], ...]


class LoadQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="query"):
    """Query to the target server: has it loaded the KV cache that `pin` names?"""

    pin: str


class LoadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="result"):
    """Response to a `LoadQuery`. `loaded` is false if the transfer failed, and the target recomputed the tokens."""

    loaded: bool


Message = Pin | Pull | LoadQuery | LoadResult


def sign(key: str, message: Message) -> dict[str, str]:
    """Return the `kv_transfer_params` with `message` for the server whose handover key is `key`."""
    text = msgspec.json.encode(message).decode()
    return {_MESSAGE: text, _SIGNATURE: _signature(key, text)}


def verify_and_decode(key: str, parameters: Mapping[str, Any] | None) -> Message | None:
    """Verify and decode the message in a request's `kv_transfer_params`, or return None if there is no message.

    Raises:
        HandoverError: The message is malformed, too long, or not signed with `key`.
    """
    text = (parameters or {}).get(_MESSAGE)
    if text is None:
        return None
    signature = (parameters or {}).get(_SIGNATURE)
    if not isinstance(text, str) or len(text) > MAX_MESSAGE_BYTES or not isinstance(signature, str):
        raise HandoverError(
            "malformed handover message: expected a string of limited length and its signature"
        )
    expected = _signature(key, text).encode()
    if not key or not hmac.compare_digest(signature.encode(errors="surrogatepass"), expected):
        raise HandoverError("the handover message is not signed with this server's key")
    try:
        message: Message = msgspec.json.decode(text, type=Message)
    except ValueError as error:  # raised by msgspec, or for text that cannot be encoded
        raise HandoverError(f"cannot decode the handover message: {error}") from error
    return message


def digest_tokens(tokens: Iterable[int]) -> str:
    """Return the SHA-256 digest of token IDs as hexadecimal digits."""
    return hashlib.sha256(b"".join(token.to_bytes(8, "little") for token in tokens)).hexdigest()


def _signature(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
