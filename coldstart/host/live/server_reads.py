"""GET requests to a running server: for its metrics, and for those of its routes that change nothing.

The metrics of several servers are merged into one text, each with a label that names its model. prometheus_client's parser
reads each character in Python: one server's metrics took half a second of CPU time that streams of tokens need.
So whole lines are checked and relabelled by a regular expression.

Invariant: the merged text is valid if the texts are. A family has one HELP and TYPE, and its samples stand together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from coldstart.host.live import messages
from coldstart.host.live.lifecycle import Residence
from coldstart.host.live.upstream import DisconnectedError

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_VALUE = r"[+-]?(?:[0-9][0-9.]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+|Inf|NaN)"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL}(?:,|(?=\}})))*)\}})?[ \t]+({_VALUE}(?:[ \t]+-?[0-9]+)?)")
_HELP = re.compile(rf"# HELP ({_NAME})(?: (.*))?")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)")
_EACH_LABEL = re.compile(_LABEL)
_SUFFIXES = ("", "_bucket", "_count", "_sum")


@dataclass(slots=True)
class _Family:
    kind: str = "untyped"
    help: str = ""
    samples: list[str] = field(default_factory=list)


def merge(own: str, servers: Iterable[tuple[str, str]]) -> tuple[str, list[str]]:
    """Merge expositions.

    Args:
        own: Exposition that receives no further label.
        servers: Pairs of a model's name and its server's exposition.

    Returns:
        The merged text, and the names of models whose text is invalid or contradicts an earlier one. Those are left out.
    """
    families = _parse(own, None)
    omitted = []
    for model, text in servers:
        try:
            found = _parse(text, model)
        except ValueError:
            found = None
        if found is None or any(families.get(name, one).kind != one.kind for name, one in found.items()):
            omitted.append(model)
            continue
        for name, family in found.items():
            families.setdefault(name, _Family(family.kind, family.help)).samples += family.samples
    return "".join(_format(name, family) for name, family in families.items()), omitted


def escape(value: str) -> str:
    """Return `value` as the content of a quoted label value."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _parse(text: str, model: str | None) -> dict[str, _Family]:
    """Return the families of a text by name. Raises ValueError for an invalid line."""
    families: dict[str, _Family] = {}
    label = "" if model is None else f'model="{escape(model)}"'
    members: set[str] = set()
    family = _Family()
    for line in text.split("\n"):
        if (found := _SAMPLE.fullmatch(line)) is not None:
            name, labels, value = found.groups()
            if name not in members:
                members, family = {name}, families.setdefault(name, _Family())
            family.samples.append(_relabel(name, labels or "", value, label))
        elif (about := _HELP.fullmatch(line) or _TYPE.fullmatch(line)) is not None:
            name, value = about.groups()
            family = families.setdefault(name, _Family())
            members = {name + suffix for suffix in _SUFFIXES}
            if about.re is _HELP:
                family.help = value or ""
            else:
                family.kind = value
        elif line.strip() and (not line.startswith("#") or line.startswith("# TYPE ")):
            raise ValueError(f"invalid line {line[:80]!r}")
    return families


def _relabel(name: str, labels: str, value: str, label: str) -> str:
    if label and "model=" in labels:
        # Prometheus itself renames a label of the target that collides with its own.
        given = (one.group() for one in _EACH_LABEL.finditer(labels))
        labels = ",".join("exported_" + one if one.startswith("model=") else one for one in given)
    joined = ",".join(part for part in (label, labels.rstrip(",")) if part)
    return f"{name}{{{joined}}} {value}\n" if joined else f"{name} {value}\n"


def _format(name: str, family: _Family) -> str:
    about = f"# HELP {name} {family.help}\n" if family.help else ""
    return f"{about}# TYPE {name} {family.kind}\n" + "".join(family.samples)


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
    own = messages.present_key(residence.key)
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
    texts = await asyncio.gather(*map(_read_metrics, serving))
    given = [(one.name, text) for one, text in zip(serving, texts, strict=True) if text is not None]
    # A thread, because many servers have many lines.
    merged, omitted = await asyncio.to_thread(merge, own.decode(), given)
    were_read = {model for model, _ in given}.difference(omitted)
    lines = [f'{_READ}{{model="{escape(one.name)}"}} {int(one.name in were_read)}\n' for one in serving]
    about = f"# HELP {_READ} 1 if the server's own metrics are included, else 0.\n# TYPE {_READ} gauge\n"
    return merged + about + "".join(lines)


async def _read_metrics(residence: Residence) -> str | None:
    try:
        status, _, body = await read(residence, "/metrics", METRICS_S)
        return body.decode() if status == 200 else None
    except (OSError, UnicodeDecodeError):
        return None
