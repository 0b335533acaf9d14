"""Attaching to the prefetcher: the open socket is the lease, its end tells of the other side's death.

Bytes of `Attached.file` are valid once `wait` returned for them; the mapping is private, so nobody else sees what is
written to it, and it outlives the prefetcher. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from coldstart.contract import environment
from coldstart.contract.weights import PacedFetch
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.timeline import EVENTS_VARIABLE
from coldstart.weights.prefetch import region_layout, spawning
from coldstart.weights.prefetch.attached import ANSWER_S, Attached, names_part, send
from coldstart.weights.prefetch.errors import (
    PrefetchError,
    PrefetchFailedError,
    PrefetchLostError,
    PrefetchRefusedError,
)
from coldstart.weights.prefetch.range_source import normal

__all__ = [
    "Attached",
    "Early",
    "PrefetchError",
    "PrefetchFailedError",
    "PrefetchLostError",
    "PrefetchRefusedError",
    "attach",
    "request",
    "start_early",
    "told",
]

# What a source may need of its client's environment: the prefetcher has that of whoever started it.
_HANDED_ON = ("AWS_", "HF_", environment.PREFETCH_TOKEN)
# A prefetcher that ends for idleness may close a connection that it never looked at.
_TRIES = 3


def attach(
    source: str,
    plan: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    background: bool = False,
    start: bool = True,
    pace: PacedFetch | None = None,
    directory: Path | None = None,
) -> Attached:
    """Take a lease on the weights of `plan` and want the tensors `names` (None: all bytes of all files, in their order).

    `source` is a local directory, http(s)://..., s3://bucket/prefix or hf://repo@revision. `directory` is where the
    prefetcher's socket lies (default: the user's runtime directory); `start` starts a prefetcher when none runs. A `pace`
    names the fetch, for `told`.
    A local directory's files are read and verified, too, but mapped themselves: the page cache is the shared copy.
    Raises PrefetchRefusedError (no room, a bad plan), PrefetchLostError when none runs and not `start`, or when it dies
    meanwhile.
    """
    layout = region_layout.read(plan)
    wanted = layout.wanted(names)
    began = monotonic()
    for attempt in range(_TRIES):
        channel = None
        try:
            # One that is being killed may still take a connection, and nothing over it.
            channel = _ask(source, plan, names, directory, start=start, background=background, pace=pace)
            return Attached(channel, layout, wanted, normal(source))
        except PrefetchLostError as error:
            if channel is None and not start:
                raise
            _closed(channel)
            if attempt + 1 == _TRIES or monotonic() - began > ANSWER_S:
                raise PrefetchLostError(f"{error}{spawning.last_words(directory)}") from error
        except BaseException:
            _closed(channel)
            raise
    raise AssertionError("the last attempt returns or raises")


def _closed(channel: Channel | None) -> None:
    if channel is not None:
        channel.close()


def start_early(
    source: str,
    plan: Mapping[str, Any],
    names: Collection[str] | None = None,
    *,
    pace: PacedFetch | None = None,
    directory: Path | None = None,
) -> Early:
    """Have fetching begin, without waiting for anything: a prefetcher is started if none runs, and finds the request.

    Returns within milliseconds. The request lives until it is fetched and somebody attached, or `Early.close()`, or
    the death of this process. Raises PrefetchError only when no process can be started.
    """
    return Early(_ask(source, plan, names, directory, start=True, background=False, pace=pace, early=True))


def told(pace: PacedFetch, *, directory: Path | None = None) -> dict[str, Any] | None:
    """Tell the fetch of that name its rate: {"rate", "bytes", "seconds" (first to last of them), "limited", "ended"}.

    `limited`: by a rate, now or before. None where it has not begun. Raises PrefetchLostError where none runs,
    PrefetchRefusedError.
    """
    found = request("pace", directory=directory, **asdict(pace))
    if "refused" in found:
        raise PrefetchRefusedError(str(found["refused"]))
    return None if found["pace"] is None else dict(found["pace"])


def request(operation: str, *, directory: Path | None = None, **more: Any) -> dict[str, Any]:
    """Ask the running prefetcher for its "status", or to "stop" (and wait for its end).

    Raises PrefetchLostError when none runs, or it says nothing for ANSWER_S.
    """
    channel = Channel(spawning.connection(directory, start=False))
    if operation != "stop":
        channel.socket.settimeout(ANSWER_S)
    try:
        channel.send({"op": operation, **more})
        answers = list(channel.replies()) if operation == "stop" else [next(channel.replies(), {})]
    except OSError as error:
        raise PrefetchLostError("The prefetcher has ended.") from error
    finally:
        channel.close()
    if not answers or not answers[0]:
        raise PrefetchLostError("The prefetcher has ended, or does not answer.")
    return dict(answers[0].get("status", answers[0]))


def _ask(
    source: str,
    plan: Mapping[str, Any],
    names: Collection[str] | None,
    directory: Path | None,
    *,
    start: bool,
    background: bool,
    pace: PacedFetch | None,
    **more: Any,
) -> Channel:
    environment = {key: value for key, value in os.environ.items() if key.startswith(_HANDED_ON)}
    message = {"op": "attach", "source": normal(source), "environment": environment, **more}
    message["background"] = background or (pace is not None and pace.background)
    message["pace"] = None if pace is None else asdict(pace)
    message["events"] = os.environ.get(EVENTS_VARIABLE)
    text = json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()
    channel = Channel(spawning.connection(directory, start=start))
    try:
        send(channel, message, names_part(names), text)
    except BaseException:
        channel.close()
        raise
    return channel


class Early:
    """The lease of whoever asked first."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def close(self) -> None:
        """Give the lease back."""
        self._channel.close()

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
