"""The fat binary reader on a file of NVIDIA's tools, compared with the output of cuobjdump."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cubins import HERE, assembler
from support.graphs_tools import fat_binary

from coldstart.graphs import references, table_files
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import AlteredTableError, MissingKernelError
from coldstart.graphs.fatbin import entries, library_entries, unpack

FILE = HERE / "library.fatbin"
needs_tools = pytest.mark.skipif(
    assembler() is None or shutil.which("cc") is None, reason="no cuobjdump or no C compiler"
)


def _cubins(data: bytes) -> list[tuple[int, bytes]]:
    return [(e.architecture, unpack(data[e.offset : e.offset + e.size])) for e in library_entries(data)]


@needs_tools
def test_the_cubins_are_those_that_cuobjdump_extracts(tmp_path: Path) -> None:
    tool = assembler()
    assert tool is not None
    subprocess.run(
        [tool.with_name("cuobjdump"), "-xelf", "all", FILE], cwd=tmp_path, check=True, capture_output=True
    )
    wanted = [path.read_bytes() for path in sorted(tmp_path.glob("*.cubin"))]
    found = _cubins(FILE.read_bytes())
    assert [image for _, image in found] == wanted and [at for at, _ in found] == [80, 90]
    layouts = {"lib_scale": ((0, 8), (8, 4), (12, 4)), "lib_add": ((0, 8), (8, 8), (16, 4))}
    assert [read_cubin(image).kernels for image in wanted] == [layouts, layouts]


@needs_tools
def test_packed_kernels_of_a_library_are_referred_to_and_fetched(tmp_path: Path) -> None:
    (tmp_path / "code.c").write_text(
        f'__asm__(".section .nv_fatbin,\\"a\\"\\n.balign 8\\n.incbin \\"{FILE}\\"\\n.text\\n"); int x;'
    )
    library = tmp_path / "libkernels.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,--build-id", "-o", library, tmp_path / "code.c"], check=True
    )
    binaries = {table_files.sha256(image): image for _, image in _cubins(FILE.read_bytes())}
    assert not any(image in library.read_bytes() for image in binaries.values())
    found = references.refer(binaries, [library])
    assert set(found) == set(binaries)
    assert {d: references.fetch(d, found, [library]) for d in found} == binaries


def test_our_own_container_reads_alike() -> None:
    images = [b"\x7fELF" + bytes([n]) * 1004 for n in range(3)]
    assert [image for _, image in _cubins(fat_binary(images))] == images


def test_only_cubins_of_the_generation_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libkernels.so"
    library.write_bytes(FILE.read_bytes())
    packed = [(e.architecture, e.offset) for e in library_entries(library.read_bytes())]
    seen = list[int]()
    monkeypatch.setattr(references, "unpack", lambda data: seen.append(len(data)) or unpack(data))
    binaries = {table_files.sha256(image): image for _, image in _cubins(FILE.read_bytes())}
    found = references.refer(binaries, [library], 90)
    assert [place["offset"] for place in found.values()] == [at for arch, at in packed if arch == 90]
    assert len(seen) == 1 and len(packed) == 2


def test_a_packed_cubin_without_zstandard_is_one_named_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (first, _) = library_entries(data := FILE.read_bytes())
    with pytest.raises(MissingKernelError, match="zstandard is not installed"):
        unpack(data[first.offset : first.offset + first.size])


def test_a_damaged_one_is_refused_or_ends() -> None:
    data = FILE.read_bytes()
    (first, _) = library_entries(data)
    packed = data[first.offset : first.offset + first.size]
    with pytest.raises(AlteredTableError):
        unpack(packed[:-8])
    with pytest.raises(AlteredTableError):
        list(library_entries(b"\x7fELF\x02\x01" + bytes(58)))
    assert list(entries(bytes(64), 0, 64)) == []
