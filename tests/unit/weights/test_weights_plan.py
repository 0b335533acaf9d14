"""Every digest of the plan is the sha256 of exactly the bytes that it names."""

import json
import os
import struct
import tempfile
import threading
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.weights import weights_plan as weights

SIZES = st.lists(st.integers(0, 5000), max_size=6)


def write(path: Path, tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of one-byte elements."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, content in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    path.write_bytes(whole)
    return whole


@examples(60)
@given(sizes=SIZES, chunk=st.integers(20, 3000))
def test_every_tensor_and_chunk_is_hashed(sizes: list[int], chunk: int) -> None:
    tensors = {f"t{n}": os.urandom(size) for n, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "CHUNK", chunk)
        whole = write(Path(name) / "model.safetensors", tensors)
        made = weights.build_plan(Path(name))
    (file,) = made["files"]
    assert file["size"] == len(whole)
    borders = {0, len(whole), *(t["offset"] for t in file["tensors"])}
    borders |= {t["offset"] + t["size"] for t in file["tensors"]}
    parts = [
        whole[at : min(at + chunk, stop)]
        for start, stop in pairwise(sorted(borders))
        for at in range(start, stop, chunk)
    ]
    assert file["chunks"] == [sha256(part).hexdigest() for part in parts] and b"".join(parts) == whole
    assert {t["name"] for t in file["tensors"]} == set(tensors)
    for tensor in file["tensors"]:
        content = whole[tensor["offset"] : tensor["offset"] + tensor["size"]]
        assert content == tensors[tensor["name"]]
        assert tensor["digest"] == "sha256:" + sha256(content).hexdigest()
        assert tensor["shape"] == [len(content)] and tensor["dtype"] == "U8"


class SharedHash:
    """SHA-256 that hashes a part of a tensor of 0xff only together with all other threads."""

    threads = threading.Barrier(2 * weights._FILES, timeout=20)

    def __init__(self, data: bytes = b"") -> None:
        self.own = sha256()
        self.update(data)
        self.hexdigest = self.own.hexdigest

    def update(self, data: bytes) -> None:
        if data.startswith(b"\xff"):
            self.threads.wait()
        self.own.update(data)


def test_files_and_both_digests_of_a_long_tensor_are_hashed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK", 100)
    for number in range(weights._FILES):
        write(tmp_path / f"model-{number}.safetensors", {f"t{number}": b"\xff" * 250})
    alone = weights.build_plan(tmp_path)
    monkeypatch.setattr(weights, "hashlib", SimpleNamespace(sha256=SharedHash))
    assert weights.build_plan(tmp_path) == alone and len(alone["files"]) == weights._FILES


def test_a_change_in_place_is_seen_though_the_files_time_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": b"1" * 100})
    before, known = path.stat(), weights.read_or_compute_digest(tmp_path, tmp_path / "cache")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert weights.read_or_compute_digest(tmp_path, tmp_path / "cache") != known
