"""The host's one TOML file.

    memory = "60GiB"            # of all models together; every member of HostSettings may stand here
    policy = "predictive"

    [models.llama2-7b]
    memory = "14GiB"
    start_s = 8.0               # from stopped until it serves
    idle_s = 600                # optional, like pinned = true

    [[models.llama2-7b.tiers]]  # optional, between awake and stopped, the quickest return first
    name = "asleep-1"
    memory = "1GiB"
    penalty_s = 0.5
    host_memory = "14GiB"

Invariant: a file that is accepted describes a host that can run; every complaint names the file and the member.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from coldstart.errors import Usage
from coldstart.host.policies import make
from coldstart.host.specification import AWAKE, HostSettings, ModelSpec, Tier, stopped

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, slots=True)
class HostFile:
    settings: HostSettings
    models: tuple[ModelSpec, ...]


def load(path: Path) -> HostFile:
    """Raises Usage for a file that cannot be read or describes no host."""
    try:
        return parse(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as problem:
        raise Usage(f"cannot read the host file {path}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise Usage(f"the host file {path} is not TOML: {problem}") from problem
    except Usage as problem:
        raise Usage(f"host file {path}: {problem}", mend=problem.mend) from problem


def parse(table: Mapping[str, Any]) -> HostFile:
    """From the file's content. Raises Usage."""
    top = dict(table)
    models = top.pop("models", {})
    if not isinstance(models, dict) or not models:
        raise Usage("no [models.NAME]", mend='write [models.NAME] with memory = "14GiB" and start_s = 8.0')
    known("the host", top, {field.name for field in fields(HostSettings)})
    settings = HostSettings(**_typed(_sized(needed("the host", top, {"memory"}))))
    make(settings.policy, {}, settings.memory)
    return HostFile(settings, tuple(_model(name, given) for name, given in models.items()))


def size(given: object) -> int:
    """Bytes from a whole number or text such as '14GiB'. Raises Usage."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(str(given).strip())
    if found is None or isinstance(given, (bool, float)):
        raise Usage(f"{given!r} is no size", mend="write bytes, or such as 14GiB")
    return round(float(found[1]) * _UNITS[found[2] or "B"])


def _model(name: str, given: Any) -> ModelSpec:
    what = f"models.{name}"
    if not isinstance(given, dict):
        raise Usage(f"{what} is no table")
    known(what, given, {"memory", "start_s", "tiers", "pinned", "idle_s"})
    needed(what, given, {"memory", "start_s"})
    between = tuple(_tier(what, tier) for tier in given.get("tiers", ()))
    tiers = (Tier(AWAKE, size(given["memory"]), 0.0), *between, stopped(seconds(what, given["start_s"])))
    idle = given.get("idle_s")
    idle_s = None if idle is None else seconds(what, idle)
    return ModelSpec(name, tiers, pinned=given.get("pinned") is True, idle_s=idle_s)


def _tier(what: str, given: Any) -> Tier:
    if not isinstance(given, dict):
        raise Usage(f"{what}.tiers holds {given!r}")
    known(f"{what}.tiers", given, {field.name for field in fields(Tier)})
    needed(f"{what}.tiers", given, {"name", "memory", "penalty_s"})
    penalty = seconds(what, given["penalty_s"])
    return Tier(str(given["name"]), size(given["memory"]), penalty, size(given.get("host_memory", 0)))


def _sized(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: size(value) if name in ("memory", "host_memory") else value for name, value in given.items()
    }


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    for field in fields(HostSettings):
        value, kind = given.get(field.name), str(field.type)
        wanted: tuple[type, ...] = (int, float) if kind == "float" else (str,) if kind == "str" else (int,)
        if field.name in given and (isinstance(value, bool) or not isinstance(value, wanted)):
            raise Usage(f"{field.name} = {value!r} is not of the kind {kind.removesuffix(' | None')}")
    return given


def seconds(what: str, given: object) -> float:
    """Raises Usage for what is no time."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
        raise Usage(f"{what}: {given!r} is no time in seconds")
    return float(given)


def known(what: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    """Raises Usage for members by other names."""
    if unknown := sorted(given.keys() - set(names)):
        raise Usage(f"{what} does not know {', '.join(unknown)}", mend=f"it knows {', '.join(sorted(names))}")


def needed(what: str, given: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    """`given`; raises Usage where it lacks one of them."""
    if missing := sorted(names - given.keys()):
        raise Usage(f"{what} lacks {', '.join(missing)}")
    return given
