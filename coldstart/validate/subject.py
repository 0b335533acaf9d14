"""From a word that the user types to a bundle, and from a bundle to what a server of it is started by.

A word is a bundle's reference, or a model as every command takes it: with vLLM's arguments it is looked up by its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import InvalidReference
from coldstart.artifacts.key import diff
from coldstart.artifacts.store import NotFound, Store
from coldstart.artifacts.verify import Finding
from coldstart.errors import Usage
from coldstart.key import inspection
from coldstart.key.inspection import Lookup
from coldstart.machine.paths import Cache
from coldstart.model import models
from coldstart.validate.launchers import Subject

NOT_SERVED = "CS-NOT-SERVED"


@dataclass(frozen=True)
class Source:
    """Of what a server is started: `vllm_args` (none: those that the bundle was made with), and the `model` where the bundle
    does not say it, which is so for one that was made from a directory.
    """

    vllm_args: Sequence[str] = ()
    model: str | None = None
    revision: str | None = None
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)

    def look_up(self, word: str, vllm_args: Sequence[str], revision: str | None) -> Lookup:
        """What `serve` finds for these words. Raises what models.resolve raises."""
        return inspection.look_up(
            word, vllm_args, cache=self.cache, offline=self.offline, revision=revision or self.revision
        )


def names_model(word: str) -> bool:
    """Whether a word can be a model: a known one, or the name of a repository; a reference with a version is neither."""
    return inspection.names_model(word) or models.is_repo_id(word)


def find(store: Store, word: str, source: Source) -> Bundle:
    """The bundle that `word` names. Raises NoBundle, NotFound, Ambiguous, InvalidReference, and what models.resolve raises."""
    asks_key = bool(source.vllm_args or source.revision) and source.model is None and names_model(word)
    if not asks_key:
        try:
            return store.get(word)
        except (NotFound, InvalidReference):
            if not inspection.names_model(word):
                raise
    lookup = source.look_up(word, source.vllm_args, None)
    found = lookup.bundle or replace(lookup, accepts=anyone).again().bundle
    if found is None:
        raise inspection.miss(lookup)
    return found


def of_bundle(bundle: Bundle, word: str, source: Source) -> Lookup:
    """What `serve` finds for the model and the arguments of `bundle`, which was asked for by `word`.

    Raises Usage where the model is a directory that nobody named, and what models.resolve raises.
    """
    provenance = bundle.manifest.provenance
    named = source.model or (word if names_model(word) else provenance.model_name)
    commit = bundle.key.fields.get("model.revision")
    revision = None if models.is_local(named) or not isinstance(commit, str) else commit
    try:
        return source.look_up(named, source.vllm_args or provenance.arguments, revision)
    except Usage as error:
        if named != provenance.model_name or models.is_repo_id(named):
            raise
        raise Usage(
            f"{bundle.ref} was made from a directory called {provenance.model_name}; where that is, a bundle never says.",
            mend=f"name it: coldstart validate {provenance.model_name} --model DIR --level replay",
        ) from error


def not_served(bundle: Bundle, lookup: Lookup) -> list[Finding]:
    """Why a server of this model with these arguments would not be started from `bundle`; empty where it would."""
    if lookup.bundle is not None and lookup.bundle.digest == bundle.digest:
        return []
    if differing := diff(lookup.key, bundle.key):
        listed = "; ".join(f"{one.field}: wanted {one.wanted}, found {one.found}" for one in differing)
        message, mend = (
            f"here this model with these arguments has another key: {listed}",
            "name the model and the arguments it was made for",
        )
    elif lookup.bundle is not None:
        message = f"a server would be started from {lookup.bundle.ref}, another version for the same key"
        mend = f"coldstart validate {lookup.bundle.ref}"
    else:
        missed = inspection.miss(lookup)
        message, mend = missed.message, missed.mend or ""
    return [Finding(NOT_SERVED, "error", message, mend, "serve")]


def subject(lookup: Lookup) -> Subject:
    """The model as coldstart and as vLLM are told of it, a hub model's files fetched. Raises NeedsAuth."""
    model = lookup.model
    if model.repo_id is not None:
        model = models.ensure_weights(model, offline=lookup.offline)
    common = ("--cache-dir", str(lookup.cache.root), *(["--offline"] if lookup.offline else []))
    target, revision = str(model.path or model.repo_id), model.revision if model.repo_id is not None else None
    return Subject(model.argument, target, tuple(lookup.vllm_args), common, revision)
