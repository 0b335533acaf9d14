"""Limits of a gateway against clients that send or hold too much, declared once for host and fleet.

The command line generates an option and an environment variable from each field of `GatewayLimits`. This module
only declares and checks the values; `coldstart.host.live` enforces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from coldstart.scheduling.declaration import Setting, setting

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits for one connection, and for all connections together."""

    head_bytes: int = setting(
        32 * KIB, "Maximum size of a request's line and headers.", "--max-head-bytes", "BYTES", least=1 * KIB
    )
    headers: int = setting(128, "Maximum number of headers of a request.", "--max-headers", "N", least=1)
    head_s: float = setting(
        10.0, "Time in which a request's headers must arrive.", "--head-timeout", "SECONDS", above=0
    )
    body_bytes: int = setting(
        64 * MIB, "Maximum size of a request body.", "--max-body-bytes", "BYTES", least=1 * KIB
    )
    body_s: float = setting(
        120.0, "Time in which a request body must arrive.", "--body-timeout", "SECONDS", above=0
    )
    buffered_bytes: int = setting(
        256 * MIB,
        "Maximum size of all waiting request bodies together.",
        "--max-buffered-bytes",
        "BYTES",
        least=1 * KIB,
    )
    idle_s: float = setting(
        60.0,
        "Time after which a connection without a request is closed.",
        "--keep-alive-timeout",
        "SECONDS",
        above=0,
    )
    write_s: float = setting(
        30.0,
        "Time after which a client that does not read is disconnected.",
        "--write-timeout",
        "SECONDS",
        above=0,
    )
    connections: int = setting(
        8192,
        "Maximum number of client connections; fewer if the process may open fewer files.",
        "--max-connections",
        "N",
        least=1,
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        for name, one in list_limits():
            one.require(name, getattr(self, name))


def list_limits() -> Iterator[tuple[str, Setting]]:
    """Yield each field's name and declaration."""
    return ((one.name, one.metadata["setting"]) for one in fields(GatewayLimits))
