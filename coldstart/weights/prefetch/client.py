"""Client of the prefetcher: attach to weights, start a fetch early, and query the status.

An open socket is the lease, and closes when the other process exits. The bytes that `WeightsLease.map_file` returns are
valid after `wait_for_bytes` has returned for them. The mapping is private, so no other process sees what is written to it,
and it outlives the prefetcher. This module uses only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from coldstart.contract import environment
from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.contract.weights import LimitedFetch
from coldstart.errors import ColdstartError
from coldstart.system import paths
from coldstart.system.ipc import peers
from coldstart.system.ipc.json_lines import Channel, create_sealed_memfd
from coldstart.weights.prefetch import PrefetchError, PrefetchLostError, PrefetchRefusedError, layout
from coldstart.weights.prefetch.attached import ANSWER_S, WeightsLease
from coldstart.weights.prefetch.sources import compute_weights_key, normalize_address

# Variables that a source needs: the prefetcher itself has the environment of its first client.
_HANDED_ON = ("AWS_", "HF_", environment.PREFETCH_TOKEN)
# A prefetcher that exits because it is idle may close a connection without reading from it.
_TRIES = 3
# The shell exits at once, so the prefetcher is not a child of the client and leaves no zombie there.
_DETACH = '"$@" &'


def attach(
    source: str,
    plan: Mapping[str, Any],
    *,
    names: Collection[str] | None = None,
    rate_limit: LimitedFetch | None = None,
    directory: Path | None = None,
) -> WeightsLease:
    """Acquire a lease on the weights of `plan`, request the tensors `names`, and return the lease.

    The prefetcher also reads and verifies the files of a local directory, but clients map the files themselves: the page
    cache is the shared copy.

    Args:
        source: Local directory, http(s)://..., s3://bucket/prefix or hf://repo@revision.
        plan: Weights plan with digests.
        names: Tensors to fetch; None means all bytes of all files, in order.
        rate_limit: Name and rate of the fetch, which `set_rate_limit` can change.
        directory: Directory of the prefetcher's socket (default: the user's runtime directory).

    Raises:
        PrefetchRefusedError: The plan is invalid or exceeds the memory budget.
        PrefetchLostError: The prefetcher exited.
    """
    plan_layout = layout.build_layout(plan)
    wanted, began = plan_layout.select_checks(names), monotonic()

    def ask() -> WeightsLease:
        channel = _ask(source, plan, names, directory, rate_limit)
        try:
            return WeightsLease(channel, plan_layout, wanted, normalize_address(source))
        except BaseException:
            channel.close()
            raise

    for _ in range(_TRIES - 1):
        # A prefetcher that is being killed may still accept a connection but not answer on it.
        with suppress(PrefetchLostError):
            return ask()
        if monotonic() - began > ANSWER_S:
            break
    try:
        return ask()
    except PrefetchLostError as error:
        raise PrefetchLostError(f"{error}{_read_log(_place(source, plan, directory))}") from error


def start_early_fetch(
    source: str,
    plan: Mapping[str, Any],
    names: Collection[str] | None = None,
    *,
    rate_limit: LimitedFetch | None = None,
    directory: Path | None = None,
) -> Channel:
    """Start a fetch without waiting for the prefetcher, which is started if none is running, and return the connection.

    This function returns within milliseconds. The request ends when its bytes are fetched and another client has
    attached, on `Channel.close()`, or when this process exits. Raises PrefetchError if no process can be started.
    """
    return _ask(source, plan, names, directory, rate_limit, early=True)


def set_rate_limit(rate_limit: LimitedFetch, *, directory: Path | None = None) -> dict[str, Any] | None:
    """Set the rate of a named fetch. Return {"rate", "bytes", "seconds", "limited", "ended"}, or None before it has begun.

    `seconds` is the time from the first to the last byte, and `limited` is whether any rate has applied so far. If the
    fetch has tried several sources, the values are those of the source with the most bytes.

    Raises:
        PrefetchRefusedError: The prefetcher rejected the rate.
    """
    answers = request("rate_limit", directory=directory, **asdict(rate_limit))
    if refused := [answer["refused"] for answer in answers if "refused" in answer]:
        raise PrefetchRefusedError(str(refused[0]))
    known = [dict(answer["rate_limit"]) for answer in answers if answer["rate_limit"] is not None]
    return max(known, key=lambda one: (one["bytes"], one["ended"]), default=None)


def request(operation: str, *, directory: Path | None = None, **more: Any) -> list[dict[str, Any]]:
    """Send an operation ("status", "stop" or "rate_limit") to each running prefetcher, and return the responses.

    "stop" returns after the prefetchers have exited. A prefetcher that does not respond within ANSWER_S seconds counts as
    exited.
    """
    answers = list[dict[str, Any]]()
    for path in list_prefetcher_sockets(directory):
        with suppress(peers.PeerError, OSError), Channel(peers.connect(path)) as channel:
            channel.socket.settimeout(ANSWER_S)
            channel.send({"op": operation, **more})
            # A prefetcher that exits closes the connection.
            replies = (
                channel.iterate_replies() if operation == "stop" else [next(channel.iterate_replies(), {})]
            )
            answers += [one.get("status", one) for one in replies if one]
    return answers


def list_prefetcher_sockets(directory: Path | None = None) -> list[Path]:
    """Return the socket paths of all prefetchers of this user."""
    return sorted((directory or paths.runtime_dir()).glob("prefetch-*.socket"))


def _encode(plan: Mapping[str, Any]) -> bytes:
    return json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()


def _place(source: str, plan: Mapping[str, Any], directory: Path | None) -> Path:
    """Return the path of the socket of the prefetcher for these weights. Raises PrefetchError."""
    try:
        return (
            directory or paths.runtime_dir()
        ) / f"prefetch-{compute_weights_key(normalize_address(source), _encode(plan))}.socket"
    except (ColdstartError, OSError) as error:
        raise PrefetchError(f"cannot find a directory for the prefetcher's socket: {error}") from error


def _ask(
    source: str,
    plan: Mapping[str, Any],
    names: Collection[str] | None,
    directory: Path | None,
    rate_limit: LimitedFetch | None,
    *,
    early: bool = False,
) -> Channel:
    environment = {key: value for key, value in os.environ.items() if key.startswith(_HANDED_ON)}
    message = {
        "op": "attach",
        "source": normalize_address(source),
        "environment": environment,
        "rate_limit": None if rate_limit is None else asdict(rate_limit),
        "early": early,
        "events": TIMELINE_EVENTS.read() or None,
    }
    path = _place(source, plan, directory)
    try:
        channel = Channel(peers.connect(path))
    except peers.PeerError:
        channel = Channel(_spawn(path))  # which is not waited for
    body = create_sealed_memfd(json.dumps(None if names is None else list(names)).encode(), _encode(plan))
    try:
        channel.send(message, (body,))
    except OSError as error:
        channel.close()
        raise PrefetchLostError(
            "cannot send the request to the prefetcher: the prefetcher has exited"
        ) from error
    finally:
        os.close(body)
    return channel


def _spawn(path: Path) -> socket.socket:
    # The process gets one end of a socket pair, and reads the request after its start. If another prefetcher started first, the
    # new process closes the socket, and the client connects again.
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [sys.executable, "-m", "coldstart.weights.prefetch.service", str(path), str(child.fileno())]
    try:
        with path.with_suffix(".log").open("wb") as log:
            subprocess.run(
                ["/bin/sh", "-c", _DETACH, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child.fileno(),),
                cwd="/",
                start_new_session=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        parent.close()
        raise PrefetchError(f"cannot start the prefetcher: {error}") from error
    finally:
        child.close()
    return parent


def _read_log(path: Path) -> str:
    """Return the last line of the exited prefetcher's log, to be appended to an error, or "" if the log is empty."""
    with suppress(OSError):
        if lines := path.with_suffix(".log").read_text(errors="replace").splitlines():
            return f"; its log ends: {lines[-1]}"
    return ""
