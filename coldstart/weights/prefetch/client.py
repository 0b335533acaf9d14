"""Client of the prefetcher: attach to weights, start a fetch early, query the status.

An open socket is the lease, and its end reports the death of the other side. Bytes of `Attached.file` are
valid after `wait` returned for them. The mapping is private, so no other process sees what is written to it,
and it outlives the prefetcher. This module uses only the standard library.
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
from coldstart.system.ipc import peers
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
from coldstart.weights.prefetch.model import name_weights
from coldstart.weights.prefetch.range_source import normalise

__all__ = [
    "Attached",
    "Early",
    "PrefetchError",
    "PrefetchFailedError",
    "PrefetchLostError",
    "PrefetchRefusedError",
    "attach",
    "name_request",
    "request",
    "set_pace",
    "start_early",
]

# Variables that a source needs: the prefetcher itself has the environment of its first client.
_HANDED_ON = ("AWS_", "HF_", environment.PREFETCH_TOKEN)
# A prefetcher that exits because it is idle may close a connection without reading from it.
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
    """Take a lease on the weights of `plan` and request the tensors `names`.

    The prefetcher also reads and verifies the files of a local directory, but clients map the files
    themselves: the page cache is the shared copy.

    Args:
        source: Local directory, http(s)://..., s3://bucket/prefix or hf://repo@revision.
        plan: Weights plan with digests.
        names: Tensors to fetch; None means all bytes of all files, in order.
        background: Fetch them only while no foreground request of any lease is unfinished.
        start: Start a prefetcher if none runs.
        pace: Name and rate of the fetch, which `set_pace` can change.
        directory: Directory of the prefetcher's socket (default: the user's runtime directory).

    Raises:
        PrefetchRefusedError: The plan is invalid or exceeds the memory budget.
        PrefetchLostError: No prefetcher runs and `start` is false, or the prefetcher ended.
    """
    layout = region_layout.read(plan)
    wanted = layout.wanted(names)
    name, began = name_request(source, plan), monotonic()
    for attempt in range(_TRIES):
        channel = None
        try:
            # A prefetcher that is being killed may still accept a connection but not answer on it.
            channel = _ask(source, plan, names, directory, start=start, background=background, pace=pace)
            return Attached(channel, layout, wanted, normalise(source))
        except PrefetchLostError as error:
            if channel is None and not start:
                raise
            _closed(channel)
            if attempt + 1 == _TRIES or monotonic() - began > ANSWER_S:
                raise PrefetchLostError(f"{error}{spawning.last_words(directory, name)}") from error
        except BaseException:
            _closed(channel)
            raise
    raise AssertionError("the last attempt returns or raises")


def name_request(source: str, plan: Mapping[str, Any]) -> str:
    """Return the name of the weights of a source and a plan, for which one prefetcher runs."""
    return name_weights(normalise(source), _encode(plan))


def _encode(plan: Mapping[str, Any]) -> bytes:
    return json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()


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
    """Start a fetch without waiting for the prefetcher, which is started if none runs.

    This function returns within milliseconds. The request ends when its bytes are fetched and another client
    has attached, on `Early.close()`, or with this process. Raises PrefetchError if no process can be started.
    """
    return Early(_ask(source, plan, names, directory, start=True, background=False, pace=pace, early=True))


def set_pace(pace: PacedFetch, *, directory: Path | None = None) -> dict[str, Any] | None:
    """Set the rate of a named fetch; return {"rate", "bytes", "seconds", "limited", "ended"}, or None before it has begun.

    `seconds` is the time from the first to the last byte, and `limited` is whether any rate applied so far. Of a fetch that
    tried several sources, the values are those of the source with the most bytes.

    Raises:
        PrefetchLostError: No prefetcher runs.
        PrefetchRefusedError: The prefetcher rejected the rate.
    """
    answers = request("pace", directory=directory, **asdict(pace))
    if refused := [answer["refused"] for answer in answers if "refused" in answer]:
        raise PrefetchRefusedError(str(refused[0]))
    known = [dict(answer["pace"]) for answer in answers if answer["pace"] is not None]
    return max(known, key=lambda one: (one["bytes"], one["ended"]), default=None)


def request(operation: str, *, directory: Path | None = None, **more: Any) -> list[dict[str, Any]]:
    """Send an operation ("status", "stop" or "pace") to the running prefetchers and return their responses.

    "stop" returns after the prefetchers have ended.

    Raises:
        PrefetchLostError: No prefetcher runs, or one did not answer within ANSWER_S seconds.
    """
    answers, error = list[dict[str, Any]](), PrefetchLostError("no prefetcher runs")
    for path in spawning.list_sockets(directory):
        try:
            answers.append(_request(path, operation, more))
        except PrefetchLostError as lost:
            error = lost
    if not answers:
        raise error
    return answers


def _request(path: Path, operation: str, more: Mapping[str, Any]) -> dict[str, Any]:
    try:
        channel = Channel(peers.connect(path))
    except peers.PeerError as error:
        raise PrefetchLostError("no prefetcher runs") from error
    if operation != "stop":
        channel.socket.settimeout(ANSWER_S)
    try:
        channel.send({"op": operation, **more})
        answers = list(channel.replies()) if operation == "stop" else [next(channel.replies(), {})]
    except OSError as error:
        raise PrefetchLostError("the prefetcher has ended") from error
    finally:
        channel.close()
    if not answers or not answers[0]:
        raise PrefetchLostError("the prefetcher has ended or does not answer")
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
    message = {"op": "attach", "source": normalise(source), "environment": environment, **more}
    message["background"] = background or (pace is not None and pace.background)
    message["pace"] = None if pace is None else asdict(pace)
    message["events"] = os.environ.get(EVENTS_VARIABLE)
    text = _encode(plan)
    channel = Channel(spawning.connection(directory, name_weights(normalise(source), text), start=start))
    try:
        send(channel, message, names_part(names), text)
    except BaseException:
        channel.close()
        raise
    return channel


class Early:
    """Lease on a fetch that started before any server attached to it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def close(self) -> None:
        """Release the lease."""
        self._channel.close()

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
