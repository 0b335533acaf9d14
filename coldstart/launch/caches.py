"""Compiler caches of a GPU engine in a bundle: vLLM's ahead-of-time artifacts, Triton, FlashInfer, DeepGEMM.

During materialization, all compilers write to one root directory, which becomes the bundle's `compile` section. A start
copies the section to a writable directory, because compilers add missing entries. Triton's group files contain absolute
paths, so the copy rewrites them. vLLM's worker loads the ahead-of-time artifacts (coldstart.vllm.engine.compiled).

A linker writes a shared object at its final path. If the linker is killed, every later start would load the truncated
file and crash, so `remove_truncated_libraries` removes such files.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coldstart.artifacts import canonical, files
from coldstart.contract.fallback import Fallback

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "flashinfer_autotune",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}
AOT = "aot"
# ELF64 (elf(5)): the section headers are at the end of the file, and the file header is written after them.
_HEAD, _MAGIC = struct.Struct("<16s24xQ10xHH2x"), b"\x7fELF"


def build_environment(root: Path) -> dict[str, str]:
    """Return the environment variables that place each compiler's cache in its own directory under `root`."""
    return {name: str(root / folder) for name, folder in VARIABLES.items()}


def collect_caches(root: Path, vllm_root: Path, target: Path) -> list[str]:
    """Copy non-empty caches below `root`, and vLLM's below `vllm_root`, to the new directory `target`. Return the names."""
    sources = {folder: root / folder for folder in VARIABLES.values()}
    sources[AOT] = vllm_root / "torch_compile_cache" / "torch_aot_compile"
    filled = {name: path for name, path in sources.items() if path.is_dir() and any(path.iterdir())}
    if filled:
        target.mkdir()
    for name, path in filled.items():
        shutil.copytree(path, target / name)
    return sorted(filled)


def copy_section(section: Path, root: Path) -> Path:
    """Copy an unpacked section to the writable directory `root` unless this directory exists. Return `root`.

    Raises:
        OSError: The copy failed, and the partial copy was removed.
    """
    if not root.is_dir():
        with files.create_owned_directory(root.parent, f"{root.name}.") as draft:
            part = draft / "part"
            try:
                shutil.copytree(section, part)
                _relocate_groups(part / VARIABLES["TRITON_CACHE_DIR"], root / VARIABLES["TRITON_CACHE_DIR"])
                part.rename(root)
            except OSError:
                if not root.is_dir():  # otherwise another start has created it
                    raise
    return root


def _relocate_groups(triton: Path, final: Path) -> None:
    """Rewrite the absolute paths in Triton's group files, which refer to the files of each kernel."""
    for group in triton.glob("*/__grp__*"):
        try:
            members = canonical.read_json(group)["child_paths"]
            here = {name: str(final / group.parent.name / Path(path).name) for name, path in members.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # Triton compiles this kernel again
        group.write_text(json.dumps({"child_paths": here}))


def remove_truncated_libraries(cache: Path) -> list[Fallback]:
    """Remove truncated shared objects under `cache` that no process is writing. Return a fallback for each of them.

    Files that cannot be read or removed are skipped. The server that loads them reports the error.
    """
    steps = []
    for path in find_truncated_libraries(cache):
        with suppress(OSError):
            if not _is_being_written(path):
                path.unlink()
                reason = f"removed {path.name}, which a killed compiler left incomplete"
                steps.append(Fallback("compile", reason))
    return steps


def find_truncated_libraries(cache: Path) -> Iterator[Path]:
    """Yield the truncated shared objects under `cache`, or nothing if the directory does not exist."""
    for path in cache.rglob("*.so"):
        with suppress(OSError):
            if not _is_complete(path):
                yield path


def _is_complete(path: Path) -> bool:
    with files.open_regular(path) as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return False
    identity, sections, size, count = _HEAD.unpack(head)
    return (
        bool(identity.startswith(_MAGIC)) and sections > 0 and sections + size * count <= path.stat().st_size
    )


def _is_being_written(path: Path) -> bool:
    own = path.stat()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            held = descriptor.stat()
            if (held.st_dev, held.st_ino) == (own.st_dev, own.st_ino):
                return True
    return False
