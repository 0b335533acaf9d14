"""Tables on disk: one .npy per table (memory-mappable) and one sealed JSON.

Invariant: load(save(t)) == t, and any changed byte of any file makes load raise AlteredTableError: the JSON holds
the sha256 of every table file and of itself without that field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.tables import ARRAYS, Array, Kernel, SymbolRegion, Tables, check

FORMAT = 1
MANIFEST = "graphs.json"


def canonical(data: object) -> bytes:
    """The one byte string of a JSON value."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def save(tables: Tables, directory: Path, binaries: Mapping[str, bytes]) -> str:
    """Write everything into `directory` (made here); return the seal."""
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
    # Renamed over the old file: `array` itself may be a map of it. Not artifacts' own way of doing so, because these graphs
    # are checked on GPU machines from the bare source tree, where that package is not.
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


def read_manifest(directory: Path) -> dict[str, Any]:
    """The sealed JSON. Raises AlteredTableError where it is cut short, changed, or of another format."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
        seal = manifest.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AlteredTableError(f"{MANIFEST} cannot be read: {error}") from error
    if seal != sha256(canonical(manifest)):
        raise AlteredTableError(f"{MANIFEST} is not what was sealed")
    if manifest.get("format") != FORMAT:
        raise AlteredTableError(
            f"{MANIFEST} has format {manifest.get('format')}, this version reads {FORMAT}"
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
        if verify and sha256(path.read_bytes()) != digest:
            raise AlteredTableError(f"{path.name} is not what was sealed")
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise AlteredTableError(f"{path.name} cannot be read: {error}") from error
    return array


def _kernel(data: Mapping[str, Any]) -> Kernel:
    pairs = {name: tuple((int(a), int(b)) for a, b in data[name]) for name in ("layout", "attributes")}
    return Kernel(**{**data, **pairs})


def load_binary(directory: Path, digest: str) -> bytes:
    """A bundled kernel binary, verified. Raises AlteredTableError."""
    try:
        data = (directory / "kernels" / digest).read_bytes()
    except OSError as error:
        raise AlteredTableError(f"kernel binary {digest[:12]} cannot be read: {error}") from error
    if sha256(data) != digest:
        raise AlteredTableError(f"kernel binary {digest[:12]} is not what was sealed")
    return data
