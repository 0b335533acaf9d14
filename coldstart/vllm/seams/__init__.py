"""Has the installed vLLM what a feature stands on? Asked before the feature is used; it steps down where the answer is no.

Invariant: `check` imports nothing of vLLM and raises nothing. Its answers are kept, with the files that they were read from, so
that a start pays for a few `stat` calls; any change of version, of those files or of the table makes them be read again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from coldstart.machine import runtime
from coldstart.machine.paths import Cache

if TYPE_CHECKING:
    from coldstart.vllm.seams.source_tree import Sources

Feature = Literal[
    "start", "worker", "compile", "lazy-kv", "template", "weights", "scheduler", "offload", "tails", "graphs", "kv-plan",
    "aot", "offline", "headless", "late-interaction", "stock", "ahead", "standby", "ending", "application",
]  # fmt: skip

READ = {"graphs": ((0, 32), runtime.SUPPORTED_VLLM[1])}
"""Where fitting shapes are not enough: what a restored graph stands on was read in these versions alone."""
_HERE = Path(__file__).parent


@functools.cache
def check(feature: Feature) -> str | None:
    """Why this vLLM cannot serve `feature`, as one sentence; None where it can."""
    try:
        root = _root()
        if root is None:
            return "vLLM is not installed."
        known = _Known(root)
        if (kept := known.answer(feature)) is not None:
            return kept[0]
        reason, files = _looked_up(feature, root)
        known.keep(feature, reason, files)
        return reason
    except Exception as error:  # noqa: BLE001 - whatever a strange installation raises, a server must start
        return f"vLLM could not be looked through: {type(error).__name__}: {error}"


def version() -> str:
    """The installed vLLM's version, "unknown" where there is none."""
    distribution = runtime.vllm_distribution()
    return distribution[1] if distribution else "unknown"


def drift(root: Path, installed: str) -> dict[str, list[str]]:
    """Every problem of every feature in the sources of version `installed` below `root`, which holds `vllm/`."""
    return {feature: _problems(feature, root, installed)[0] for feature in get_args(Feature)}


def _looked_up(feature: str, root: Path) -> tuple[str | None, list[Path]]:
    faults, files = _problems(feature, root, version())
    reason = f"vLLM {version()} is not as {feature!r} needs it: {'; '.join(faults)}." if faults else None
    return reason, files


def _problems(feature: str, root: Path, installed: str) -> tuple[list[str], list[Path]]:
    from coldstart.vllm.seams import table
    from coldstart.vllm.seams.fit import problems

    sources = _sources(root)
    sources.read.clear()
    faults = [problem for seam in table.seams_for(feature) for problem in problems(seam, sources)]
    if feature in READ and not runtime.within(installed, READ[feature]):
        faults.insert(0, f"what it stands on was not read in {installed}")
    return list(dict.fromkeys(faults)), list(sources.read)


@functools.cache
def _sources(root: Path) -> Sources:
    from coldstart.vllm.seams.source_tree import Sources

    return Sources(root)


def _root() -> Path | None:
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).parent if places else None


class _Known:
    """Answers of earlier processes, in one file for each installation."""

    def __init__(self, root: Path) -> None:
        self._root = root
        name = hashlib.sha256(f"{root}\0{version()}\0{_table_stamp()}".encode()).hexdigest()[:24]
        self._file = Cache.at().writable / "seams" / f"{name}.json"

    def answer(self, feature: str) -> tuple[str | None] | None:
        """The answer in a tuple; None where it is not known or its files have changed."""
        held = self._read().get(feature)
        if not held or "reason" not in held or not isinstance(held.get("files"), dict):
            return None
        fresh = held["files"] and all(
            _stamp(self._root / name) == stamp for name, stamp in held["files"].items()
        )
        return (held["reason"],) if fresh else None

    def keep(self, feature: str, reason: str | None, files: list[Path]) -> None:
        """Write the answer down, where that is possible."""
        stamps = {str(file.relative_to(self._root)): _stamp(file) for file in files}
        held = self._read() | {feature: {"reason": reason, "files": stamps}}
        temporary = self._file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(held))
            temporary.replace(self._file)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            held = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        entries = held.items() if isinstance(held, dict) else ()
        return {name: entry for name, entry in entries if isinstance(entry, dict)}


def _stamp(file: Path) -> list[int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def _table_stamp() -> str:
    return repr([_stamp(file) for file in sorted(_HERE.glob("*.py"))])
