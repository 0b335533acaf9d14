"""A second user of the machine attacks files, keys, sockets, templates, shared memory and temporary names of the first.

A real process with another user id makes each attempt on files that the tool created. An attack succeeds if it returns a value.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.store import Store
from tools.bundles import CODE, key, provenance, write_tree

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import template_pool
from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.proc import scratch
from coldstart.system.trust.unpacked import unpacked

Act = Callable[[Callable[[], object]], object]
SECRET = b"memory of a process"


@dataclass(frozen=True)
class Victim:
    """Files and template of one user, with the file modes that the tool sets."""

    tmp: Path
    store: Store
    image: Path
    code: Path
    warm: template_pool.Warm
    scratch: Path


@pytest.fixture
def victim(
    home: Path, tmp_path: Path, fake_engine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Victim]:
    previous = os.umask(0)  # the worst there is: every mode must be the tool's own decision
    tmp = home / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    home.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    fake_engine("serves")
    store = Store(paths.Cache.at().bundles)
    with store.begin(key()) as draft:
        draft.add_tree("snapshot", write_tree(tmp_path / "image", {"pages-1.img": SECRET}))
        draft.add_tree("compile", write_tree(tmp_path / "code", CODE))
        bundle = draft.publish(provenance(), signer=sign.host_key(paths.state_dir()))
    code = unpacked(bundle, "compile", paths.Cache.at().unpacked, inspection.trust)
    image = unpacked(bundle, "snapshot", paths.Cache.at().unpacked, inspection.trust)
    warm = template_pool.start("engine", LaunchPlan(["serves"], key="sha256:" + "a" * 64), "tiny", 20)
    try:
        with scratch.scratch() as own:
            yield Victim(tmp, store, image, code, warm, own)
    finally:
        os.umask(previous)
        template_pool.stop(warm, force=True)


def attacks(v: Victim) -> dict[str, Callable[[], object]]:
    """Return attacks by name; an attack that returns None or raises OSError has failed."""
    state, runtime, kept = paths.state_dir(), paths.runtime_dir(), paths.frozen_dir()
    blob = blob_path(v.store.root, v.store.list()[0].entry("snapshot").digest)
    marker = b"of another user's"

    def won_by_writing(path: Path) -> Callable[[], object]:
        return lambda: (path.open("r+b").write(marker), str(path))[1]

    def won_by_replacing(path: Path) -> Callable[[], object]:
        return lambda: (path.rename(path.with_name("stolen")), str(path))[1]

    def won_by_adding(directory: Path) -> Callable[[], object]:
        return lambda: ((directory / "planted.py").write_bytes(marker), str(directory))[1]

    def read(path: Path) -> Callable[[], object]:
        return lambda: len(path.read_bytes())

    def connect() -> object:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(v.warm.socket))
            client.sendall(b"\0\0\0\2{}")
            return bool(client.recv(1))

    return {
        "read the blob of a snapshot": read(blob),
        "read an unpacked image": read(v.image / "pages-1.img"),
        "list an unpacked image": lambda: os.listdir(v.image),  # noqa: PTH208
        "overwrite unpacked code": won_by_writing(v.code / "kernel.so"),
        "replace unpacked code": won_by_replacing(v.code / "kernel.so"),
        "replace the directory of unpacked code": won_by_replacing(v.code),
        "add a module beside unpacked code": won_by_adding(v.code),
        "replace the directory of all unpacked code": won_by_replacing(v.code.parent),
        "read the signing key": lambda: (
            [len(p.read_bytes()) for p in sorted(state.rglob("*key*")) if "pub" not in p.name] or None
        ),
        "trust a key of one's own": won_by_adding(sign.trust_dir(state)),
        "write a record of what was unpacked": won_by_adding(state / "unpacked"),
        "replace the records": won_by_replacing(state / "unpacked"),
        "connect to a template": connect,
        "list the runtime directory": lambda: os.listdir(runtime),  # noqa: PTH208
        "replace a template's socket": won_by_replacing(v.warm.socket),
        "rewrite what a template was made of": won_by_writing(v.warm.directory / "files.sha256"),
        "read a template's log": read(v.warm.directory / "log"),
        "read a template's environment": read(Path(f"/proc/{v.warm.pid}/environ")),
        "read a template's memory": read(Path(f"/proc/{v.warm.pid}/mem")),
        "stop a template": lambda: os.kill(v.warm.pid or -1, 15) or "stopped",  # type: ignore[func-returns-value]
        "list a server's temporary files": lambda: os.listdir(v.scratch),  # noqa: PTH208
        "plant a socket for a server": won_by_adding(v.scratch),
        "remove the directory of temporary files": won_by_replacing(v.scratch.parent),
        "list frozen state": lambda: os.listdir(kept),  # noqa: PTH208
        "plant in frozen state": won_by_adding(kept),
    }


@pytest.mark.slow
def test_twenty_five_attacks_on_what_is_there(victim: Victim, stranger: Act) -> None:
    tried = attacks(victim)
    won = {name: found for name, act in tried.items() if (found := stranger(act)) is not None}
    assert len(tried) == 25 and won == {}
    assert victim.warm.ready and (victim.code / "kernel.so").read_bytes() == CODE["kernel.so"]
