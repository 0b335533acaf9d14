"""Offline and online phases on simulated processes, and helpers to inspect them."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from coldstart.graphs import capture, combine, contents, gate, table_files
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import GraphError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import Tables
from tests.support.graphs.model import Shape, SimModel, libraries

SMALL = Shape("small", 2, sizes=(1, 8, 64, 256))


@dataclass
class Half:
    """One process that captured everything."""

    model: SimModel
    captured: dict[str, Captured]
    snapshot: Snapshot


def offline(seed: int, shape: Shape = SMALL, model: SimModel | None = None) -> Half:
    """Capture every size, largest first."""
    model = model or SimModel(shape, seed)
    captured = {key: model.capture(key) for key in reversed(model.sizes())}
    return Half(model, captured, capture.take(model.driver, model, captured))


def bundle(directory: Path, shape: Shape = SMALL, seeds: Sequence[int] = (1, 2, 5, 6)) -> Tables:
    """Combine two processes, and more that resolve ambiguous words, to one bundle on disk."""
    a, b, *more = (offline(seed, shape) for seed in seeds)
    combined = combine.combine(a.snapshot, b.snapshot, [half.snapshot for half in more])
    tables = contents.minimise(b.model.driver, b.model, b.captured, combined, b.snapshot.contents)
    table_files.save(tables, directory, b.snapshot.binaries)
    return tables


def proven(directory: Path, shape: Shape = SMALL) -> Tables:
    """Create a bundle that passed the gate in a third process."""
    tables = bundle(directory, shape)
    model = SimModel(shape, 3)
    proof = gate.prove(Restorer(directory, model.driver, model), model.driver, model, model)
    gate.publish(proof, directory)
    return tables


def seal(bundle: Path, target: Path, tables: Tables) -> Path:
    """Write `tables` with the binaries of `bundle` to `target` and seal them."""
    digests = table_files.read_manifest(bundle)["binaries"]
    table_files.save(tables, target, {digest: table_files.load_binary(bundle, digest) for digest in digests})
    return target


def is_wrong(directory: Path, key: str, seed: int = 21) -> bool:
    """Return whether restored and captured outputs differ or the replay faults."""
    model = SimModel(SMALL, seed)
    restorer = Restorer(directory, model.driver, model)
    assert restorer.link()
    restored = restorer.graph(key)
    assert restored.restored, restorer.fallbacks
    try:
        got = outputs(model, restored.executable, key)
    except GraphError:
        return True
    return got != outputs(model, model.capture(key).executable, key)


def outputs(model: SimModel, executable: int, key: str, seed: int = 9) -> bytes:
    """Return the outputs of one replay."""
    model.prepare(key, seed)
    model.driver.launch(executable, 0)
    return model.observe(key)


def fat_binary(images: Iterable[bytes]) -> bytes:
    """Return one container with every second cubin packed; test_graphs_fatbin.py checks the format on a file of NVIDIA."""
    body = b""
    for number, image in enumerate(images):
        packed = zstandard.compress(image) if number % 2 else image
        payload = packed.ljust(-(-len(packed) // 8) * 8, b"\0")
        flags, used, whole = (0x8011, len(packed), len(image)) if number % 2 else (0x11, 0, 0)
        head = struct.pack("<HHIQI8xI8xQQ", 2, 0x101, 64, len(payload), used, 90, flags, whole)
        body += head.ljust(64, b"\0") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def kernel_library(directory: Path, images: Iterable[Path] = ()) -> Path:
    """Compile a shared library that contains `images`, by default those of the simulated libraries."""
    files = list(images)
    for library in () if files else libraries():
        path = directory / f"{library.name}.cubin"
        path.write_bytes(library.image)
        files.append(path)
    (directory / "kernels.fatbin").write_bytes(fat_binary([path.read_bytes() for path in files]))
    lines = [
        '__asm__(".section .nv_fatbin,\\"a\\"\\n.balign 8\\n"',
        f'".incbin \\"{directory}/kernels.fatbin\\"\\n.text\\n");',
        "int here(void) { return 1; }",
    ]
    (directory / "code.c").write_text("\n".join(lines))
    target = directory / "libkernels.so"
    command = ["cc", "-shared", "-fPIC", "-Wl,--build-id", "-o", str(target), str(directory / "code.c")]
    subprocess.run(command, check=True, capture_output=True)
    return target
