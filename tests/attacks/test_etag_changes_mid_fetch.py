"""A file is replaced on the server during a fetch: no unit mixes both versions, and the digests decide."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tools.raw_server import Asked, answering
from weights_tools import FILE, checkpoint, prefetcher

from coldstart.weights.prefetch import client


class _Replaced:
    """Server that sends half of each requested range; its ETag changes after `changes_at` responses."""

    def __init__(self, before: bytes, after: bytes, changes_at: int) -> None:
        self.before, self.after, self.changes_at, self.answers = before, after, changes_at, 0
        self.starts: list[tuple[int, str]] = []

    def __call__(self, connection: socket.socket, asked: Asked) -> None:
        self.answers += 1
        new = self.answers > self.changes_at
        data = self.after if new else self.before
        first, last = map(int, asked.headers["range"].removeprefix("bytes=").split("-"))
        self.starts.append((first, "new" if new else "old"))
        size = last + 1 - first
        head = (
            f"HTTP/1.1 206 P\r\nContent-Length: {size}\r\nContent-Range: bytes {first}-{last}/{len(data)}\r\n"
        )
        tag = f'ETag: "{"new" if new else "old"}"\r\n\r\n'
        whole = size if new else max(1, size // 2)
        connection.sendall((head + tag).encode() + data[first : first + whole])
        if whole < size:
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("same", [True, False], ids=["same bytes", "other bytes"])
def test_etag_changes_mid_fetch(same: bool, tmp_path: Path) -> None:
    plan = checkpoint(tmp_path / "w", tensors=1, size=9000)
    data = (tmp_path / "w" / FILE).read_bytes()
    server = _Replaced(data, data if same else data[:-1] + b"?", changes_at=1)
    settings = {"COLDSTART_PREFETCH_MEMORY_BYTES": 64 << 20, "COLDSTART_PREFETCH_STREAMS": 1}
    with (
        answering(server) as running,
        prefetcher(tmp_path / "r", **settings) as runtime,
        client.attach(running.url, plan, directory=runtime) as attached,
    ):
        if same:
            attached.complete()
            assert attached.file(FILE) == data
        else:
            with pytest.raises(client.PrefetchFailedError, match="wrong bytes"):
                attached.complete()
        errors = attached.stats()["errors"]
    # The rest of the unit must not come from the new file: the client requests the full unit again.
    assert server.starts[0] == (0, "old") and server.starts[1][1] == "new"
    assert (0, "new") in server.starts[2:]
    assert any("changed at its source" in error and '"old"' in error for error in errors)
