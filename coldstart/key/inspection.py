"""What can be said about a bundle or a key without running anything: needs neither torch nor vllm.

A word the user types is a bundle in the store, or else a model whose key is composed for this machine.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coldstart.artifacts.bundle import Bundle, TrustResult
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Key, Mismatch, diff
from coldstart.artifacts.section import SECTION_TYPES
from coldstart.artifacts.store import NotFound, Store
from coldstart.errors import NoBundle
from coldstart.key import keys
from coldstart.machine import paths, secrets
from coldstart.model import models
from coldstart.model.aliases import NAMES
from coldstart.model.models import Model

# In `stages`: what a materialization could not make.
NOT_MADE = "not_made"


@dataclass(frozen=True)
class Lookup:
    """A composed key and what the store has for it: the bundle, or the nearest one and where it differs."""

    model: Model
    key: Key
    bundle: Bundle | None
    nearest: Bundle | None
    mismatches: tuple[Mismatch, ...]
    vllm_args: tuple[str, ...] = ()


def find_bundle(store: Store, ref: str) -> Bundle | None:
    """The bundle called ``ref``, None if there is none. Raises Ambiguous and InvalidReference."""
    try:
        return store.get(ref)
    except NotFound:
        return None


def names_model(word: str) -> bool:
    """Whether ``word`` is a model known without asking the hub: built in, an alias, or a directory."""
    return word.lower() in NAMES or paths.expand(word).is_dir()


def look_up(
    store: Store,
    word: str,
    vllm_args: Sequence[str] = (),
    *,
    offline: bool = False,
    revision: str | None = None,
    cache_dir: Path | None = None,
) -> Lookup:
    """Compose the key of the model ``word`` here and look it up. Raises what models.resolve raises."""
    model = models.resolve(word, revision=revision, offline=offline, cache_dir=cache_dir)
    key = keys.compose_argv(model, vllm_args)
    given = tuple(vllm_args)
    try:
        return Lookup(model, key, store.find(key, name=model.name), None, (), given)
    except NotFound as error:
        nearest, mismatches = error.nearest or (None, [])
        return Lookup(model, key, None, nearest, tuple(mismatches), given)


class Asked(Protocol):
    """Any request that names a model and vLLM's arguments."""

    @property
    def model(self) -> str: ...
    @property
    def vllm_args(self) -> Sequence[str]: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def offline(self) -> bool: ...
    @property
    def cache_dir(self) -> Path | None: ...


def look_up_for(asked: Asked) -> Lookup:
    """`look_up` in the store under the request's own cache root."""
    return look_up(
        Store(paths.store_dir(asked.cache_dir)),
        asked.model,
        asked.vllm_args,
        offline=asked.offline,
        revision=asked.revision,
        cache_dir=asked.cache_dir,
    )


def miss(found: Lookup) -> NoBundle:
    """The error for a lookup without a bundle: field, wanted, found, and the command that makes one."""
    if found.nearest is None:
        detail = "and none for this model under another key"
    else:
        lines = [f"\n  {m.field}: wanted {m.wanted}, found {m.found}" for m in found.mismatches]
        detail = f"the nearest, {found.nearest.name}:v{found.nearest.version}, differs in" + "".join(lines)
    return NoBundle(
        f"No bundle for {found.model.name} with key {found.key.short} in the store; {detail}",
        mend=shlex.join(["coldstart", "materialize", found.model.argument, *_after(found.vllm_args)]),
    )


def _after(vllm_args: Sequence[str]) -> list[str]:
    return ["--", *secrets.arguments(vllm_args)] if vllm_args else []


def trust(bundle: Bundle) -> TrustResult:
    """Whether a key that this user trusts signed ``bundle``."""
    from coldstart.artifacts import (
        sign,  # cryptography: a start whose code is unpacked already does without it
    )

    return sign.trusted(bundle, sign.trust_dir(paths.state_dir()))


def describe(bundle: Bundle) -> dict[str, object]:
    """Everything the manifest says, as plain data."""
    manifest, judged = bundle.manifest, trust(bundle)
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "size": bundle.size,
        "format_version": manifest.format_version,
        "key": {"digest": manifest.key.digest, "fields": dict(manifest.key.fields)},
        "sections": [section.document() for section in manifest.sections],
        "provenance": manifest.provenance.document(),
        "trust": {"ok": judged.ok, "signer": judged.signer, "reason": judged.reason},
    }


def not_made(bundle: Bundle) -> dict[str, str]:
    """Sections that its materialization could not make, with the reasons."""
    try:
        stages = bundle.json("stages") if bundle.has("stages") else {}
    except BundleError:
        return {}
    found = stages.get(NOT_MADE) if isinstance(stages, dict) else None
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def tree(bundle: Bundle) -> dict[str, list[tuple[str, int]]]:
    """(name, bytes) of the members of each section that is a tree; every blob read is verified."""
    return {
        entry.type: _members(bundle, entry.type)
        for entry in bundle.manifest.sections
        if bundle.has(entry.type) and SECTION_TYPES[entry.type].encoding == "tar.zst"
    }


def compare(left: Bundle, right: Bundle) -> tuple[list[Mismatch], list[Mismatch]]:
    """Where two bundles differ: fields of the key, and digests of sections."""
    return diff(left.key, right.key), _section_differences(left, right)


def _section_differences(left: Bundle, right: Bundle) -> list[Mismatch]:
    ours = {entry.type: entry.digest for entry in left.manifest.sections}
    theirs = {entry.type: entry.digest for entry in right.manifest.sections}
    pairs = [Mismatch(name, ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})]
    return [pair for pair in pairs if pair.wanted != pair.found]


def _members(bundle: Bundle, name: str) -> list[tuple[str, int]]:
    from coldstart.artifacts import tar, unpack

    entry = bundle.entry(name)
    with bundle.open_blob(name) as reader:
        stream = unpack.Budgeted(reader, unpack.budget(entry))
        listed = [(member.name, member.size) for member, _ in tar.members(stream) if not member.is_directory]
        reader.drain()
    return listed
