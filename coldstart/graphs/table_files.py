"""Tables on disk: one memory-mappable .npy file for each table and one sealed JSON file.

Invariant: load(save(t)) == t, and load raises AlteredTableError after any changed byte of any file. The JSON
file has the SHA-256 of every table file, and of itself without that member.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.tables import ARRAYS, Array, Kernel, SymbolRegion, Tables, check

FORMAT = 2  # format 1 observed rows of outputs that its graphs do not write
MANIFEST = "graphs.json"


def canonical(data: object) -> bytes:
    """Return the canonical bytes of a JSON value."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def save(tables: Tables, directory: Path, binaries: Mapping[str, bytes]) -> str:
    """Write the tables and kernel binaries into `directory`, which is created; return the seal."""
    check(tables)
    (directory / "kernels").mkdir(parents=True, exist_ok=True)
    digests = {name: _save_array(directory / f"{name}.npy", getattr(tables, name)) for name in ARRAYS}
    for digest, data in binaries.items():
        (directory / "kernels" / digest).write_bytes(data)
    manifest = _manifest(tables, digests, sorted(binaries))
    manifest["seal"] = sha256(canonical(manifest))
    (directory / MANIFEST).write_bytes(canonical(manifest))
    return str(manifest["seal"])


def _save_array(path: Path, array: Array) -> str:
    # Rename over the old file, because `array` may be a map of it. `artifacts.files` has a function for this, but GPU machines
    # check these graphs from a source tree without that package.
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    part.replace(path)
    return sha256(path.read_bytes())


def _manifest(tables: Tables, digests: dict[str, str], binaries: list[str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "tables": digests,
        "binaries": binaries,
        "keys": tables.keys,
        "kernels": [asdict(k) for k in tables.kernels],
        "attributes": tables.attributes,
        "regions": [{"symbol": r.symbol, "size": r.size} for r in tables.regions],
        "refused": tables.refused,
        "report": tables.report,
    }


def require_file(path: Path) -> Path:
    """Return `path`. Raises OSError if it is no regular file, such as a pipe, on which a read would wait."""
    # As above, `artifacts.files` has a reader that is safe also where another user can write.
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return path


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the sealed JSON. Raises AlteredTableError if it is truncated, changed or of another format."""
    try:
        manifest: dict[str, Any] = json.loads(require_file(directory / MANIFEST).read_bytes())
        seal = manifest.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise AlteredTableError(f"cannot read {MANIFEST}: {error}") from error
    if seal != sha256(canonical(manifest)):
        raise AlteredTableError(f"{MANIFEST} does not match its seal")
    if manifest.get("format") != FORMAT:
        raise AlteredTableError(
            f"{MANIFEST} has format {manifest.get('format')}, but this version reads format {FORMAT}"
        )
    manifest["seal"] = seal
    return manifest


def load(directory: Path, *, verify: bool = True) -> Tables:
    """Memory-map the tables; `verify` hashes them first. Raises AlteredTableError."""
    manifest = read_manifest(directory)
    arrays = {
        name: _load_array(directory / f"{name}.npy", manifest["tables"].get(name), verify) for name in ARRAYS
    }
    tables = Tables(
        **arrays,
        keys=list(manifest["keys"]),
        kernels=[_kernel(k) for k in manifest["kernels"]],
        attributes=[tuple((int(i), str(v)) for i, v in a) for a in manifest["attributes"]],
        regions=[SymbolRegion(**r) for r in manifest["regions"]],
        refused=manifest["refused"],
        report=manifest["report"],
    )
    check(tables)
    return tables


def _load_array(path: Path, digest: str | None, verify: bool) -> Array:
    try:
        if verify and sha256(require_file(path).read_bytes()) != digest:
            raise AlteredTableError(f"{path.name} does not match its digest")
        array: Array = np.load(require_file(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise AlteredTableError(f"cannot read {path.name}: {error}") from error
    return array


def _kernel(data: Mapping[str, Any]) -> Kernel:
    pairs = {name: tuple((int(a), int(b)) for a, b in data[name]) for name in ("layout", "attributes")}
    return Kernel(**{**data, **pairs})


def load_binary(directory: Path, digest: str) -> bytes:
    """Return a bundled kernel binary, verified. Raises AlteredTableError."""
    try:
        data = require_file(directory / "kernels" / digest).read_bytes()
    except OSError as error:
        raise AlteredTableError(f"cannot read kernel binary {digest[:12]}: {error}") from error
    if sha256(data) != digest:
        raise AlteredTableError(f"kernel binary {digest[:12]} does not match its digest")
    return data
