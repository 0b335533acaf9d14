"""A test cluster on one machine whose links are real: network namespaces on a bridge, each with a limit on what comes in.

    sudo python -m tools.link_cluster 8MB one two     # in tests/: stays until Ctrl-C, and says how to run something in each

Each place has a loopback, one interface with an address of its own, and a route to the bridge, which this machine has an
address on. What goes from the bridge to a place passes a token bucket (tc tbf); what goes out of it is not limited. Nothing
outside can be reached. Everything is gone when the block is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NETWORK = "10.83"
# What may pass at once, and how long a byte may wait before it is dropped: TCP finds the rate by either.
BURST_S, LATENCY = 0.02, "100ms"


def lacking() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces with limited links need root"
    if missing := [word for word in ("ip", "tc") if shutil.which(word) is None]:
        return f"network namespaces with limited links need {' and '.join(missing)} (iproute2)"
    probe = f"cs{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine lets nobody make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class LinkCluster:
    """Places by name. `bridge` is this machine's own address on it."""

    def __init__(self) -> None:
        # Two clusters at once are two networks.
        number = os.getpid() % 250
        self._id, self._subnet = f"cs{os.getpid()}", f"{NETWORK}.{number}"
        self.bridge, self._places = f"{self._subnet}.1", dict[str, int]()
        _run("ip", "link", "add", self._id, "type", "bridge")
        _run("ip", "addr", "add", f"{self.bridge}/24", "dev", self._id)
        _run("ip", "link", "set", self._id, "up")

    def add(self, name: str, rate: float | None = None) -> None:
        """A new place into which `rate` bytes/s come at most."""
        number = self._places[name] = len(self._places) + 2
        space, outer, inner = self._space(name), self._outer(name), f"{self._id}i{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        _run("ip", "link", "set", inner, "netns", space, "name", "eth0")
        _run("ip", "link", "set", outer, "master", self._id, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{self.address(name)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.bridge),
        ):
            _run("ip", "-n", space, *words)
        if rate is not None:
            self.limit(name, rate)

    def limit(self, name: str, rate: float) -> None:
        """From now on at most so many bytes/s come in, headers counted."""
        how = ("rate", f"{8 * rate:.0f}bit", "burst", f"{max(32 << 10, BURST_S * rate):.0f}")
        _run("tc", "qdisc", "replace", "dev", self._outer(name), "root", "tbf", *how, "latency", LATENCY)

    def cut(self, name: str) -> None:
        """Nothing comes in or goes out any more, and nobody is told."""
        _run("ip", "link", "set", self._outer(name), "down")

    def hint(self, name: str) -> None:
        """As it was before `cut`."""
        _run("ip", "link", "set", self._outer(name), "up")

    def address(self, name: str) -> str:
        """Of a place."""
        return f"{self._subnet}.{self._places[name]}"

    def within(self, name: str, *words: str) -> list[str]:
        """The command that runs these words there."""
        return ["ip", "netns", "exec", self._space(name), *words]

    def received(self, name: str) -> int:
        """Bytes that have come in, headers counted."""
        return int(Path(f"/sys/class/net/{self._outer(name)}/statistics/tx_bytes").read_text())

    def down(self) -> None:
        """Remove everything; what still runs in a place loses its network."""
        for name in self._places:
            _run("ip", "link", "del", self._outer(name))
            _run("ip", "netns", "del", self._space(name))
        _run("ip", "link", "del", self._id)

    def _space(self, name: str) -> str:
        return f"{self._id}-{name}"

    def _outer(self, name: str) -> str:
        return f"{self._id}o{self._places[name]}"


@contextmanager
def link_cluster() -> Iterator[LinkCluster]:
    """An empty cluster. Raises CalledProcessError where `lacking` says why."""
    made = LinkCluster()
    try:
        yield made
    finally:
        made.down()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


def main(rate: str, names: Sequence[str]) -> None:
    """Stay until a signal."""
    from coldstart.units import parse_size

    if reason := lacking():
        raise SystemExit(f"skipped: {reason}")
    with link_cluster() as cluster:
        print(f"this machine: {cluster.bridge}")
        for name in names:
            cluster.add(name, float(parse_size(rate)))
            print(f"{name}: {cluster.address(name)}  {' '.join(cluster.within(name, 'COMMAND'))}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
