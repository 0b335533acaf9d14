"""Test cluster on one machine with real links: network namespaces on a bridge, each with limited incoming bandwidth.

Each namespace has a loopback, one interface, and a route to the bridge. A token bucket (tc tbf) limits incoming traffic;
outgoing traffic is not limited. Addresses outside the bridge are unreachable. `link_cluster` removes everything at the end
of its block.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETWORK = "10.83"
# What may pass at once, and how long a byte may wait before it is dropped: TCP finds the rate by either.
BURST_S, LATENCY = 0.02, "100ms"


def find_missing() -> str | None:
    """Return the reason why this machine cannot create a cluster, or None."""
    if os.geteuid() != 0:
        return "network namespaces with limited links need root"
    if missing := [word for word in ("ip", "tc") if shutil.which(word) is None]:
        return f"network namespaces with limited links need {' and '.join(missing)} (iproute2)"
    probe = f"cs{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this machine cannot create network namespaces"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class LinkCluster:
    """Network namespaces by name; `bridge` is this machine's address."""

    def __init__(self) -> None:
        # Two clusters at once are two networks.
        number = os.getpid() % 250
        self._id, self._subnet = f"cs{os.getpid()}", f"{NETWORK}.{number}"
        self.bridge, self._places = f"{self._subnet}.1", dict[str, int]()
        _run("ip", "link", "add", self._id, "type", "bridge")
        _run("ip", "addr", "add", f"{self.bridge}/24", "dev", self._id)
        _run("ip", "link", "set", self._id, "up")

    def add(self, name: str, rate: float | None = None) -> None:
        """Add a namespace that receives at most `rate` bytes/s."""
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
        """Limit incoming traffic to `rate` bytes/s, headers included."""
        how = ("rate", f"{8 * rate:.0f}bit", "burst", f"{max(32 << 10, BURST_S * rate):.0f}")
        _run("tc", "qdisc", "replace", "dev", self._outer(name), "root", "tbf", *how, "latency", LATENCY)

    def cut(self, name: str) -> None:
        """Stop all traffic without closing connections."""
        _run("ip", "link", "set", self._outer(name), "down")

    def reconnect(self, name: str) -> None:
        """Undo `cut`."""
        _run("ip", "link", "set", self._outer(name), "up")

    def address(self, name: str) -> str:
        """Return the address of a namespace."""
        return f"{self._subnet}.{self._places[name]}"

    def within(self, name: str, *words: str) -> list[str]:
        """Return the command that runs `words` in a namespace."""
        return ["ip", "netns", "exec", self._space(name), *words]

    def received(self, name: str) -> int:
        """Return the number of received bytes, headers included."""
        return int(Path(f"/sys/class/net/{self._outer(name)}/statistics/tx_bytes").read_text())

    def down(self) -> None:
        """Remove everything; processes that still run in a namespace lose their network."""
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
    """Yield an empty cluster. Raises CalledProcessError where `find_missing` returns a reason."""
    made = LinkCluster()
    try:
        yield made
    finally:
        made.down()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
