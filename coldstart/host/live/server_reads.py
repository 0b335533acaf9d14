"""GET requests to a running server: for its metrics, and for those of its routes that change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from coldstart.host.live import exposition, headers
from coldstart.host.live.residence import Residence
from coldstart.host.live.upstream import DisconnectedError

READABLE = ("/health", "/load", "/metrics", "/ping", "/tokenizer_info", "/version")
"""Routes of vLLM's server that a GET may read: they change nothing and reveal no arguments and no paths."""

MAX_BYTES = 8 << 20
# Time in seconds that one server may take for its metrics.
METRICS_S = 1.0
_READ = "coldstart_host_server_metrics_read"


async def read(residence: Residence, path: str, timeout_s: float) -> tuple[int, str, bytes]:
    """Return status, content type and body of a GET.

    Raises:
        OSError: The server does not answer in time, disconnects, or answers with more than MAX_BYTES.
    """
    own = headers.present_key(residence.key)
    async with (
        asyncio.timeout(timeout_s),
        await residence.upstream.request("GET", path, headers=own) as answer,
    ):
        parts, size = [], 0
        while part := await answer.piece():
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise DisconnectedError(f"the server answers with more than {MAX_BYTES} bytes")
        given = {name.lower(): value for name, value in answer.headers}
        kind = given.get(b"content-type", b"application/octet-stream").decode("latin-1")
        return answer.status, kind, b"".join(parts)


async def add_metrics(own: bytes, residences: Iterable[Residence]) -> str:
    """Return the host's own metrics with those of its running servers, each labelled with its model."""
    serving = [residence for residence in residences if residence.serves]
    found = await asyncio.gather(*map(_read_metrics, serving))
    texts = {residence.name: text for residence, text in zip(serving, found, strict=True)}
    # A thread, because many servers have many lines.
    return await asyncio.to_thread(_merge, own.decode(), texts)


async def _read_metrics(residence: Residence) -> str | None:
    try:
        status, _, body = await read(residence, "/metrics", METRICS_S)
        return body.decode() if status == 200 else None
    except (OSError, UnicodeDecodeError):
        return None


def _merge(own: str, texts: dict[str, str | None]) -> str:
    given = [(model, text) for model, text in texts.items() if text is not None]
    merged, omitted = exposition.merge(own, given)
    read_models = {model for model, _ in given}.difference(omitted)
    lines = [
        f'{_READ}{{model="{exposition.escape(model)}"}} {int(model in read_models)}\n' for model in texts
    ]
    about = f"# HELP {_READ} 1 if the server's own metrics are included, else 0.\n# TYPE {_READ} gauge\n"
    return merged + about + "".join(lines)
