"""The host's one TOML file.

    memory = "60GiB"            # of all models together; every member of HostSettings may stand here
    policy = "predictive"
    idle_s = 900                # of each model that says nothing else

    [models.llama2-7b]
    memory = "14GiB"            # memory and start_s: a live host takes them from the bundle where they are not given
    start_s = 8.0               # from stopped until it serves
    idle_s = 600                # optional, like pinned = true
    model = "meta-llama/Llama-2-7b-hf"  # what is served, by default what the table is called
    args = ["--max-model-len", "4096"]  # vLLM's
    aliases = ["llama"]         # further names; mode, on_miss, revision, untrusted: as for `coldstart serve`
    engine_template = false     # true: a live host keeps the built engine as well, and forks its servers from that

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.errors import Usage
from coldstart.host.launches import FAIL, Catalogue, Launch
from coldstart.host.policies import make
from coldstart.host.specification import AWAKE, TEMPLATE, HostSettings, ModelSpec, Tier, stopped

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)?")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


_LAUNCH = {"model", "args", "aliases", "mode", "on_miss", "revision", "untrusted"}
_LAUNCH |= {"engine_template", "unlisted"}
_FIGURES = {"memory", "start_s", "tiers", "pinned", "idle_s"}


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a model before it was ever started here: bytes when awake, seconds from stopped, and from where.

    `forked_s` are the seconds from its engine template, where that is known; `shared` are bytes of `memory` that it shares
    with a runtime template of which it is forked.
    """

    memory: int
    start_s: float
    source: str
    forked_s: float | None = None
    shared: int = 0


Profiles = Callable[[Launch], Profile]


@dataclass(frozen=True, slots=True)
class HostFile:
    """`sources` says of each model where its memory is known from: the file, or its profile's source."""

    settings: HostSettings
    models: tuple[ModelSpec, ...]
    catalogue: Catalogue
    sources: Mapping[str, str]


def read(path: Path, kind: str = "host") -> dict[str, Any]:
    """The content of the host's file, or of another `kind`. Raises Usage for one that cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise Usage(f"cannot read the {kind} file {path}: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise Usage(f"the {kind} file {path} is not TOML: {problem}") from problem


def load(path: Path, profiles: Profiles | None = None) -> HostFile:
    """Raises Usage for a file that cannot be read or describes no host."""
    table = read(path)
    try:
        return parse(table, profiles)
    except Usage as problem:
        raise Usage(f"host file {path}: {problem}", mend=problem.mend) from problem


def parse(table: Mapping[str, Any], profiles: Profiles | None = None) -> HostFile:
    """From the file's content; `profiles` says what the file does not of a model. Raises Usage, and what `profiles` raises."""
    top = dict(table)
    models = top.pop("models", {})
    if not isinstance(models, dict) or not models:
        raise Usage("no [models.NAME]", mend='write [models.NAME] with memory = "14GiB" and start_s = 8.0')
    if "idle_s" in top:
        idle_s = top.pop("idle_s")
        models = {
            name: {"idle_s": idle_s, **given} if isinstance(given, dict) else given
            for name, given in models.items()
        }
    known_members("the host", top, {field.name for field in fields(HostSettings)})
    settings = HostSettings(**_typed(_sized(needed_members("the host", top, {"memory"}))))
    make(settings.policy, {}, settings.memory)
    launches = {name: _launch(name, given) for name, given in models.items()}
    catalogue = Catalogue(launches.values())
    known = {name: _known_by(models[name], launch, profiles) for name, launch in launches.items()}
    if settings.runtime_template:
        known = {name: one and replace(one, memory=one.memory - one.shared) for name, one in known.items()}
    specs = tuple(_model(name, given, known[name]) for name, given in models.items())
    sources = {
        name: "file" if profile is None or "memory" in models[name] else profile.source
        for name, profile in known.items()
    }
    return HostFile(settings, specs, catalogue, sources)


def size(given: object) -> int:
    """Bytes from a whole number or text such as '14GiB'. Raises Usage."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(str(given).strip())
    if found is None or isinstance(given, (bool, float)):
        raise Usage(f"{given!r} is no size", mend="write bytes, or such as 14GiB")
    return round(float(found[1]) * _UNITS[found[2] or "B"])


def _launch(name: str, given: Any) -> Launch:
    what = f"models.{name}"
    if not isinstance(given, dict):
        raise Usage(f"{what} is no table")
    known_members(what, given, _LAUNCH | _FIGURES)
    return Launch(
        name,
        str(_kind(what, given, "model", str, name)),
        Arguments(_words(what, given, "args")),
        tuple(_words(what, given, "aliases")),
        _kind(what, given, "mode", str, "auto"),
        _kind(what, given, "on_miss", str, FAIL),
        _kind(what, given, "revision", str, None),
        _kind(what, given, "untrusted", bool, False),
        _kind(what, given, "engine_template", bool, False),
        _kind(what, given, "unlisted", bool, False),
    )


def _kind(what: str, given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if name in given and not isinstance(value, kind):
        raise Usage(f"{what}: {name} = {value!r} is not of the kind {kind.__name__}")
    return value


def _words(what: str, given: Mapping[str, Any], name: str) -> Iterator[str]:
    words: Sequence[Any] = _kind(what, given, name, list, [])
    for word in words:
        if not isinstance(word, str):
            raise Usage(f"{what}: {name} holds {word!r}, which is no text", mend=f'write "{word}"')
        yield word


def _known_by(given: Mapping[str, Any], launch: Launch, profiles: Profiles | None) -> Profile | None:
    """The model's profile, where the file does not say all."""
    if profiles is None or {"memory", "start_s"} <= given.keys():
        needed_members(f"models.{launch.name}", given, {"memory", "start_s"})
        return None
    return profiles(launch)


def _model(name: str, given: Any, known: Profile | None) -> ModelSpec:
    what = f"models.{name}"
    memory = size(given["memory"]) if known is None or "memory" in given else known.memory
    start = as_seconds(what, given["start_s"]) if known is None or "start_s" in given else known.start_s
    between = [_tier(what, tier) for tier in given.get("tiers", ())]
    if given.get("engine_template") and TEMPLATE not in (tier.name for tier in between):
        # As much as awake until it was measured: the host learns it at the first start.
        forked_s = start if known is None or known.forked_s is None else min(start, known.forked_s)
        most = min([memory, *(tier.memory for tier in between)])
        between.append(Tier(TEMPLATE, most, max([forked_s, *(tier.penalty_s for tier in between)])))
    tiers = (Tier(AWAKE, memory, 0.0), *between, stopped(start))
    idle = given.get("idle_s")
    idle_s = None if idle is None else as_seconds(what, idle)
    return ModelSpec(name, tiers, pinned=_kind(what, given, "pinned", bool, False), idle_s=idle_s)


def _tier(what: str, given: Any) -> Tier:
    if not isinstance(given, dict):
        raise Usage(f"{what}.tiers holds {given!r}")
    known_members(f"{what}.tiers", given, {field.name for field in fields(Tier)})
    needed_members(f"{what}.tiers", given, {"name", "memory", "penalty_s"})
    penalty = as_seconds(what, given["penalty_s"])
    return Tier(str(given["name"]), size(given["memory"]), penalty, size(given.get("host_memory", 0)))


def _sized(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: size(value) if name in ("memory", "host_memory") else value for name, value in given.items()
    }


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    for field in fields(HostSettings):
        value, kind = given.get(field.name), str(field.type)
        wanted: tuple[type, ...] = {"float": (int, float), "str": (str,), "bool": (bool,)}.get(kind, (int,))
        if field.name in given and (
            isinstance(value, bool) != (kind == "bool") or not isinstance(value, wanted)
        ):
            raise Usage(f"{field.name} = {value!r} is not of the kind {kind.removesuffix(' | None')}")
    return given


def as_seconds(what: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
        raise Usage(f"{what}: {given!r} is no time in seconds")
    return float(given)


def known_members(what: str, given: Mapping[str, Any], names: Collection[str]) -> None:
    if unknown := sorted(given.keys() - set(names)):
        raise Usage(f"{what} does not know {', '.join(unknown)}", mend=f"it knows {', '.join(sorted(names))}")


def needed_members(what: str, given: Mapping[str, Any], names: set[str]) -> Mapping[str, Any]:
    if missing := sorted(names - given.keys()):
        raise Usage(f"{what} lacks {', '.join(missing)}")
    return given
