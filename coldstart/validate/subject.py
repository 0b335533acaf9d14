"""Find the bundle that the user names, and the model and arguments with which a server of it starts.

The user names a bundle by its reference, or a model, which is looked up with vLLM's arguments by its key.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import diff
from coldstart.artifacts.verify import Finding
from coldstart.errors import UsageError
from coldstart.models import inspection, resolution, resolver
from coldstart.models.inspection import Lookup
from coldstart.system import secrets
from coldstart.system.paths import Cache
from coldstart.validate.checks import Level
from coldstart.validate.launchers import Subject
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights

NOT_SERVED = "CS-NOT-SERVED"
OTHER_WEIGHTS = "CS-OTHER-WEIGHTS"


@dataclass(frozen=True)
class Source:
    """The model and the arguments of a server.

    Without `vllm_args` a server has the arguments of the bundle's materialization. `model` is required for a bundle of a model
    directory, because a bundle does not record paths.
    """

    vllm_args: Sequence[str] = ()
    model: str | None = None
    revision: str | None = None
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)

    def look_up(self, word: str, vllm_args: Sequence[str], revision: str | None) -> Lookup:
        """Look up as `serve` does. Raises the errors of `resolution.resolve`."""
        return inspection.look_up(
            word, vllm_args, cache=self.cache, offline=self.offline, revision=revision or self.revision
        )


def find_bundle(word: str, source: Source) -> Bundle:
    """Find the bundle of `word`. Raises the errors of `resolver.find_bundle`."""
    given = () if source.model is not None else source.vllm_args
    revision = None if source.model is not None else source.revision
    return resolver.find_bundle(word, given, cache=source.cache, offline=source.offline, revision=revision)


def look_up_bundle(bundle: Bundle, word: str, source: Source) -> Lookup:
    """Look up the model and the arguments of `bundle`, which the user named by `word`, as `serve` does.

    Raises UsageError where the model is a directory that the user did not name, and the errors of `resolution.resolve`.
    """
    provenance = bundle.manifest.provenance
    named = source.model or (word if resolver.names_model(word) else provenance.model_name)
    commit = bundle.key.fields.get("model.revision")
    revision = None if resolution.is_local(named) or not isinstance(commit, str) else commit
    try:
        return source.look_up(named, source.vllm_args or provenance.arguments, revision)
    except UsageError as error:
        if named != provenance.model_name or resolution.is_repo_id(named):
            raise
        raise UsageError(
            f"cannot find the model of {bundle.ref}: it is a directory called {provenance.model_name}, whose path is unknown",
            hint=f"coldstart validate {provenance.model_name} --model DIR --level replay",
        ) from error


def explain_not_served(
    bundle: Bundle, lookup: Lookup, word: str, level: Level, source: Source
) -> list[Finding]:
    """Return why a server of this model with these arguments would not use `bundle`; empty if it would.

    `word`, `level` and `source` are those of the user's command, which the hint repeats.
    """
    if lookup.bundle is not None and lookup.bundle.digest == bundle.digest:
        return []
    if differing := diff(lookup.key, bundle.key):
        listed = "; ".join(f"{one.field}: wanted {one.wanted}, found {one.found}" for one in differing)
        message, hint = (
            f"this model with these arguments has another key on this machine: {listed}",
            "specify the model and the arguments of the bundle",
        )
    elif lookup.bundle is not None:
        message = f"a server would use {lookup.bundle.ref}, another version for the same key"
        hint = _format_validate(lookup.bundle.ref, level, source)
    else:
        missed = inspection.miss(lookup)
        message, hint = missed.message, missed.hint or ""
        if lookup.untrusted is not None:
            # The lookup may have the bundle's own arguments, which can name code to load: repeat only what was typed.
            again = _format_validate(word, level, source)
            hint = f"coldstart trust add FILE, with its publisher's public key; then {again}"
    return [Finding(NOT_SERVED, "error", message, hint, "serve")]


def explain_other_weights(bundle: Bundle, lookup: Lookup) -> list[Finding]:
    """Return a finding if the model has other weights than the bundle was proved with; empty if the tensors are the same.

    A server of such a model uses the bundle, but no token can be compared with the bundle's. The weights are hashed once.
    """
    directory, records = lookup.model.path, lookup.cache.weights
    if directory is None or lookup.vllm_args.value("load_format") == "dummy" or not bundle.has("weights"):
        return []
    try:
        known = checkpoint.parse(cast("dict[str, Any]", bundle.json("weights"))).document()
    except checkpoint.InvalidWeightsPlanError:
        return []  # no server can use it, and `serve --weights-from` names it
    if weights.identity(directory, records) == weights.digest(known):
        return []
    if not (differing := weights.find_difference(known, weights.plan(directory, records))):
        return []
    return [
        Finding(
            OTHER_WEIGHTS,
            "error",
            f"{lookup.model.argument} has other weights than {bundle.ref} was built from: {differing} differs",
            f"use a directory with the bundle's weights, or build a bundle of these: {lookup.format_materialize('--force')}",
            "weights",
        )
    ]


def _format_validate(word: str, level: Level, source: Source) -> str:
    words = ["coldstart", "validate", word, "--level", level]
    words += ["--model", source.model] if source.model is not None else []
    words += ["--revision", source.revision] if source.revision is not None else []
    return shlex.join([*words, *(["--", *secrets.arguments(source.vllm_args)] if source.vllm_args else [])])


def ensure_files(lookup: Lookup) -> Lookup:
    """Return the lookup after its files of a hub model were fetched. Raises the errors of `resolution.ensure_weights`."""
    if lookup.model.repo_id is None:
        return lookup
    return replace(lookup, model=resolution.ensure_weights(lookup.model, offline=lookup.offline))


def prepare_subject(lookup: Lookup) -> Subject:
    """Build the subject of the launchers."""
    model = lookup.model
    common = ("--cache-dir", str(lookup.cache.root), *(["--offline"] if lookup.offline else []))
    target, revision = str(model.path or model.repo_id), model.revision if model.repo_id is not None else None
    return Subject(model.argument, target, tuple(lookup.vllm_args), common, revision)
