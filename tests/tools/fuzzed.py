"""Bundles with structure-aware mutations of documents and plain sections, and their readers.

Every digest is made right again after a mutation, so that readers get past the first check. A reader may refuse (BundleError,
ColdstartError) or do without; anything else that it raises is a finding, as is a write outside of `root` or 5 s.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.bundle import anyone
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.section import SECTION_TYPES
from coldstart.artifacts.store import Store
from coldstart.artifacts.verify import check

from coldstart.errors import ColdstartError

Json = Any
DEADLINE_S = 5.0
_EVIL: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1, 10**9, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-308),
    *(
        "",
        "x" * 5000,
        "\0",
        "\x1b[2J",
        "../../etc/passwd",
        "/etc/passwd",
        "~root",
        "\u202e",
        "NaN",
        "-1",
        "sha256:",
    ),
    *("C:\\x", "${HOME}", "; rm", "\n", "é" * 300, "\ud7ff", "http://127.0.0.1:1/x", "file:///etc/passwd"),
    *([], {}, [[]], [None], {"": None}, [1, "a", None], {"a": {"a": {"a": []}}}, [0] * 3000),
)
_TENSOR = {
    "name": "model.norm.weight",
    "dtype": "F32",
    "shape": [1],
    "offset": 8,
    "size": 4,
    "digest": "0" * 64,
}
PLAIN: dict[str, Json] = {
    "kv": {"bytes": 1 << 20, "blocks": 7, "bytes_per_block": 4096.5},
    "iterations": {"prefill": [[1, 0.01], [64, 0.1]], "decode": [[1, 0.01], [8, 0.02]]},
    "stages": {
        "ready_s": 6.0,
        "spans": {"load weights": 0.1, "first token": 0.2, "import": 2.0},
        "not_made": {"graphs": "no GPU"},
    },
    "modelinfo": {
        "vllm_modelinfos": {"vllm-model.json": '{"hash": "0", "modelinfo": {}}'},
        "canary": {"prompt": [1, 2, 3], "tokens": [5, 6]},
        "weights": f"sha256:{'1' * 64}",
    },
    "weights": {
        "chunk": 16 << 20,
        "files": [{"name": "model.safetensors", "size": 12, "chunks": ["0" * 64], "tensors": [_TENSOR]}],
    },
}
DOCUMENTS = ("config", "manifest", "index")
TARGETS = (*PLAIN, "compile", *DOCUMENTS)


def mutated(value: Json, chance: random.Random, times: int) -> Json:
    """Return `value` with changes at random positions."""
    made = copy.deepcopy(value)
    for _ in range(times):
        made = _change(made, chance)
    return made


def _change(value: Json, chance: random.Random) -> Json:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.08:
        return copy.deepcopy(chance.choice(_EVIL))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    how = chance.random()
    if how < 0.55:
        value[key] = _change(value[key], chance)
    elif how < 0.7:
        del value[key]
    elif how < 0.8 and isinstance(value, dict):
        value[str(chance.choice(_EVIL))[:200]] = value.pop(key)
    elif how < 0.9 and isinstance(value, list):
        value.extend(copy.deepcopy(value[:200]))
    else:
        value[key] = copy.deepcopy(chance.choice(_EVIL))
    return value


def dump(value: Json, chance: random.Random) -> bytes:
    """Return JSON that is sometimes malformed."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    how = chance.random()
    if how < 0.04:
        return text[: chance.randrange(len(text) + 1)]
    if how < 0.08 and text:
        at = chance.randrange(len(text))
        return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
    if how < 0.09:
        return b"[" * 5000 + text
    return text.replace(b"1", b"NaN", 1) if how < 0.1 else text


def tree(chance: random.Random) -> bytes:
    """Return a tar.zst with unusual members or changed bytes."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=chance.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    ) as tar:
        for _ in range(chance.randrange(4)):
            info = tarfile.TarInfo(
                chance.choice(["a", "b/c", "../x", "/etc/x", "a" * 300, "a//b", ".", "x\n", "é"])
            )
            info.type = chance.choice(
                [tarfile.REGTYPE] * 4 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE]
            )
            info.linkname, info.mode = (
                chance.choice(["", "/etc/passwd", "../x"]),
                chance.choice([0o644, 0o4777, 0]),
            )
            data = chance.choice([b"", b"{}", b"\x80\x04.", b"\x7fELF", bytes(3000)])
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    data = bytearray(buffer.getvalue())
    for _ in range(chance.choice([0, 0, 1, 8])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    packed = bytearray(zstandard.compress(bytes(data)))
    for _ in range(chance.choice([0, 0, 0, 1, 4])):
        packed[chance.randrange(len(packed))] = chance.randrange(256)
    return bytes(packed)


def write(root: Path, target: str, chance: random.Random, key: dict[str, Json]) -> None:
    """Write a store with one bundle whose only defect is the mutated `target`."""
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    for old in blobs.iterdir():
        old.unlink()
    times = chance.choice([1, 1, 1, 2, 5])
    sections = {
        name: dump(mutated(value, chance, times), chance) if name == target else canonical.dumps(value)
        for name, value in PLAIN.items()
    }
    sections["compile"] = tree(chance) if target == "compile" else zstandard.compress(bytes(1024))
    table = [_section(name, data) for name, data in sorted(sections.items())]
    provenance = {
        "created": "2026-01-02T03:04:05Z",
        "tool": {"coldstart": "0"},
        "arguments": [],
        "seconds": {},
    }
    config: Json = {"format_version": "1.0", "key": key, "sections": table}
    config["provenance"] = provenance | {"model_name": "org/tiny", "host_note": None}
    config_data = (
        dump(mutated(config, chance, times), chance) if target == "config" else canonical.dumps(config)
    )
    layers = tuple(oci.Descriptor(item["media_type"], item["digest"], item["size"]) for item in table)
    image = oci.ImageManifest(oci.BUNDLE_TYPE, oci.describe(config_data, oci.CONFIG_TYPE), layers).document()
    if target == "manifest":
        image = dump(mutated(json.loads(image), chance, times), chance)
    digest = canonical.digest(canonical.dumps(key))
    named = {oci.NAME: "org/tiny", oci.KEY: digest, oci.VERSION: "1"}
    entry = oci.Descriptor(oci.MANIFEST_TYPE, canonical.digest(image), len(image), named, oci.BUNDLE_TYPE)
    index = oci.index_document([entry])
    if target == "index":
        index = dump(mutated(json.loads(index), chance, times), chance)
    for data in (*sections.values(), config_data, image):
        (blobs / canonical.digest(data).removeprefix("sha256:")).write_bytes(data)
    (root / oci.INDEX_FILE).write_bytes(index)
    (root / oci.LAYOUT_FILE).write_bytes(oci.LAYOUT)


def _section(name: str, data: bytes) -> dict[str, Json]:
    return {
        "type": name,
        "version": 1,
        "digest": canonical.digest(data),
        "size": len(data),
        "media_type": SECTION_TYPES[name].media_type,
        "annotations": {},
    }


@dataclass
class Finding:
    """Unexpected result of one reader on one mutation."""

    seed: int
    target: str
    reader: str
    what: str


@dataclass
class Fuzz:
    """Reads mutated stores with `readers`, which are named after the commands that they represent."""

    root: Path
    key: dict[str, Json]
    readers: dict[str, Callable[[Store], object]]
    findings: list[Finding] = field(default_factory=list)
    refused: int = 0
    read: int = 0
    slowest_s: float = 0.0

    def one(self, seed: int) -> None:
        """Write mutation number `seed` and read it with every reader."""
        chance = random.Random(seed)
        target = TARGETS[seed % len(TARGETS)]
        write(self.root, target, chance, self.key)
        for name, reader in self.readers.items():
            began = time.monotonic()
            try:
                reader(Store(self.root))
                self.read += 1
            except (BundleError, ColdstartError):
                self.refused += 1
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                at = error.__traceback__
                while at is not None and at.tb_next is not None:
                    at = at.tb_next
                where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else "?"
                self.findings.append(
                    Finding(seed, target, name, f"{type(error).__name__} at {where}: {error}"[:200])
                )
            seconds = time.monotonic() - began
            self.slowest_s = max(self.slowest_s, seconds)
            if seconds > DEADLINE_S:
                self.findings.append(Finding(seed, target, name, f"took {seconds:.1f} s"))


def readers(model: str) -> dict[str, Callable[[Store], object]]:
    """Return list, inspect, validate --level checksum, and serve --dry-run (plain, scheduled, fetched) as functions."""
    from coldstart.commands import _bundle_views
    from coldstart.commands import list as list_command

    from coldstart.launch import planning
    from coldstart.launch.request import ServeRequest
    from coldstart.models import inspection
    from coldstart.scheduling.settings import SchedulerSettings

    def listed(store: Store) -> object:
        return list_command._text([list_command._data(bundle, trusted=True) for bundle in store.list()])

    def inspected(store: Store) -> object:
        bundle = store.get("org/tiny")
        view, files = _bundle_views.view_bundle(bundle), _bundle_views.view_files(bundle)
        json.dumps([view.data, files.data])
        return view.data, view.text(), files.data, files.text()

    def validated(store: Store) -> object:
        return [check(bundle) for bundle in store.list()]

    def dry_run(**more: Any) -> Callable[[Store], object]:
        def plan(_: Store) -> object:
            found = inspection.look_up(model, accepts=anyone)
            planned = planning.plan(ServeRequest(found, without_bundle=True, **more))
            json.dumps(planned.document())
            return planned

        return plan

    return {
        "list": listed,
        "inspect": inspected,
        "validate": validated,
        "serve --dry-run": dry_run(),
        "serve --dry-run --scheduler": dry_run(scheduler=SchedulerSettings("skip-join-mlfq")),
        "serve --dry-run --weights-from": dry_run(weights_from="http://127.0.0.1:1/w"),
    }


@contextmanager
def writes_outside(root: Path) -> Iterator[list[str]]:
    """Record paths outside of `root` that this process creates, opens for writing, moves or removes in the block."""
    found: list[str] = []
    allowed = (f"{root.resolve()}/", "/dev/", "/proc/")
    names = {"os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.truncate"}
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching or (event not in names and event != "open"):
            return
        path, flags = arguments[0], arguments[2] if event == "open" else os.O_WRONLY
        if not isinstance(path, str | bytes | os.PathLike) or not isinstance(flags, int):
            return
        if event == "open" and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        whole = str(Path(os.fsdecode(path)).absolute())
        if not whole.startswith(allowed) and "__pycache__" not in whole:
            found.append(f"{event} {whole}")

    sys.addaudithook(hook)
    try:
        yield found
    finally:
        watching = False
