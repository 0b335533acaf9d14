"""Caches of a GPU engine's compilers, carried in a bundle: vLLM's ahead-of-time artefacts, Triton, FlashInfer, DeepGEMM.

Offline the compilers write below one root; that tree is the bundle's `compile` section.  A start copies it to a root of
its own key, since the compilers write there what they miss, and gives Triton's group files, which name their members
by absolute path, the paths of this place.  vLLM's artefacts go where its worker looks (coldstart.vllm.engine.aot).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep_gemm",
}
AOT = "aot"


def environment(root: Path) -> dict[str, str]:
    """Where each compiler keeps its results, below `root`."""
    return {name: str(root / folder) for name, folder in VARIABLES.items()}


def collect(root: Path, vllm_root: Path, target: Path) -> list[str]:
    """Copy what an engine's compilers have left into the new directory `target`; the names of what there was."""
    sources = {folder: root / folder for folder in VARIABLES.values()}
    sources[AOT] = vllm_root / "torch_compile_cache" / "torch_aot_compile"
    filled = {name: path for name, path in sources.items() if path.is_dir() and any(path.iterdir())}
    if filled:
        target.mkdir()
    for name, path in filled.items():
        shutil.copytree(path, target / name)
    return sorted(filled)


def lay(section: Path, root: Path) -> Path:
    """A writable copy of an unpacked section as `root`, made once. Raises OSError; of a copy that failed nothing is left."""
    if not root.is_dir():
        part = Path(tempfile.mkdtemp(prefix=f"{root.name}.", dir=root.parent))
        try:
            shutil.copytree(section, part, dirs_exist_ok=True)
            _relocate_groups(part / VARIABLES["TRITON_CACHE_DIR"], root / VARIABLES["TRITON_CACHE_DIR"])
            part.rename(root)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            if not root.is_dir():  # else another start was first
                raise
    return root


def _relocate_groups(triton: Path, final: Path) -> None:
    """Triton finds a kernel by a group file that names the kernel's files absolutely: they lie beside it."""
    for group in triton.glob("*/__grp__*"):
        try:
            members = json.loads(group.read_text())["child_paths"]
            here = {name: str(final / group.parent.name / Path(path).name) for name, path in members.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # Triton compiles that kernel again
        group.write_text(json.dumps({"child_paths": here}))
