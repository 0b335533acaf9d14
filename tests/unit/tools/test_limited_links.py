"""The test cluster of network namespaces: addresses, limits, and removal."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tools.link_cluster import find_missing, link_cluster

WHY = find_missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
SIZE, RATE = 4 << 20, 4e6
SEND = """
import socket, sys
server = socket.create_server((sys.argv[1], 9))
print(flush=True)
server.accept()[0].sendall(bytes(int(sys.argv[2])))
"""
TAKE = """
import socket, sys, time
sock, left, began = socket.create_connection((sys.argv[1], 9)), int(sys.argv[2]), time.monotonic()
while left:
    left -= len(sock.recv(1 << 20))
print(time.monotonic() - began)
"""


def _spaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_link_limits_incoming_traffic_and_is_removed() -> None:
    with link_cluster() as cluster:
        cluster.add("source")
        cluster.add("node", RATE)
        send = cluster.within("source", sys.executable, "-c", SEND, cluster.address("source"), str(SIZE))
        with subprocess.Popen(send, stdout=subprocess.PIPE) as source:
            assert source.stdout is not None
            source.stdout.readline()
            take = cluster.within("node", sys.executable, "-c", TAKE, cluster.address("source"), str(SIZE))
            took = float(subprocess.run(take, capture_output=True, text=True, check=True).stdout)
        # Content of the bucket and tolerance of the clock; a busy machine only takes longer.
        assert took > 0.9 * SIZE / RATE
        assert cluster.received("node") >= SIZE
        name = cluster.within("node")[3]
        assert name in _spaces()
    assert name not in _spaces()
