"""Reuse what transformers finds in the files of installed packages each time it is imported.

transformers 5 reads the names that its 2,400 model files define, twice, and the file lists of all installed packages. The
results are stored in the state directory, and are used while these files have the same sizes and times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coldstart.artifacts import files
from coldstart.system import file_state
from coldstart.vllm import late

_Found = TypeVar("_Found")
# The names that each module defines, by the packages that they need. The order of the modules is that of transformers.
_Names = list[tuple[list[str], dict[str, list[str]]]]


def reuse_scans() -> None:
    """Make the next import of transformers in this process use stored results, or store them. Call it before the import."""
    scan: Any = metadata.packages_distributions
    metadata.packages_distributions = lambda: _reuse(
        Path(sys.prefix), _list_distributions, dict[str, list[str]], scan
    )
    late.run_when_imported("transformers.utils.import_utils", _reuse_names)


def _reuse_names(module: Any) -> None:
    scan, models = module.define_import_structure, Path(module.__file__).parents[1] / "models"

    def scan_models() -> _Names:
        found = scan(str(models))
        return [
            (list(needed), {name: list(names) for name, names in each.items()})
            for needed, each in found.items()
        ]

    def define(module_path: Any, prefix: str | None = None) -> Any:
        start = "" if prefix is None else f"{prefix}."
        if Path(module_path) in (models, models / "__init__.py"):
            with suppress(AttributeError, TypeError):  # a release that returns something else
                return {
                    frozenset(needed): {f"{start}{name}": set(names) for name, names in each.items()}
                    for needed, each in _reuse(models, lambda: _list_sources(models), _Names, scan_models)
                }
        return scan(module_path, prefix)

    module.define_import_structure = define


def _reuse(
    place: Path, list_files: Callable[[], Iterator[os.DirEntry[str]]], kind: Any, scan: Callable[[], _Found]
) -> _Found:
    """Return the stored result of `scan` about `place`. If a file has changed, call `scan` and store its result."""
    record, state = file_state.locate_record("scans", place), blake2b(digest_size=16)
    try:
        for entry in list_files():
            status = entry.stat()
            state.update(f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    except OSError:
        return scan()
    with suppress(OSError, msgspec.MsgspecError):
        known, found = msgspec.json.decode(record.read_bytes(), type=tuple[str, kind])
        if known == state.hexdigest():
            return found  # type: ignore[no-any-return]
    found = scan()
    with suppress(OSError):
        files.create_private_directory(record.parent)
        with files.open_replacement(record, mode=0o600, durable=False) as file:
            file.write(msgspec.json.encode((state.hexdigest(), found)))
    return found


def _list_distributions() -> Iterator[os.DirEntry[str]]:
    """Yield the metadata directories of all installed packages."""
    for directory in sys.path:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory or ".") as entries:
            yield from (entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))


def _list_sources(directory: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield the Python files below a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _list_sources(entry.path)
