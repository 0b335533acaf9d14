"""Run one validation: find the bundle that each word names, and check it.

The user names a bundle by its reference, or a model, which is looked up with vLLM's arguments by its key. A server of the
bundle starts with the bundle's model and arguments.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import diff
from coldstart.errors import UsageError
from coldstart.models import inspection, keys, resolution, resolver
from coldstart.models.inspection import Lookup
from coldstart.system import secrets
from coldstart.system.paths import Cache
from coldstart.validate import answers, checks, start
from coldstart.validate.answers import PromptSettings
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launchers import Subject
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights

MOST = 256
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


@dataclass(frozen=True)
class ValidationRequest:
    """References or models to validate.

    `source` specifies the model and the arguments of the servers, `replay` the requests that they receive. With
    `against_machine`, the hardware and the versions of this machine are compared, too.
    """

    words: Sequence[str]
    level: checks.Level = "checksum"
    source: Source = field(default_factory=Source)
    replay: PromptSettings = start.REPLAY
    against_machine: bool = False


def run(request: ValidationRequest) -> list[checks.ValidationReport]:
    """Return one report per word.

    Raises BundleNotFoundError and NoBundleError for a word that names no bundle, UsageError for options that contradict each
    other or prompts that every server rejects, and the errors of `resolution.resolve`.
    """
    _check_request(request)
    found = [(word, find_bundle(word, request.source)) for word in request.words]
    machine = keys.machine_fields() if request.against_machine else None
    reports = []
    for word, bundle in found:
        report = checks.check_bundle(bundle, request.level, machine)
        if request.level in checks.STARTING and not report.fails("error"):
            report = replace(report, findings=(*report.findings, *_check_start(bundle, word, request)))
        reports.append(report)
    return reports


def _check_start(bundle: Bundle, word: str, request: ValidationRequest) -> list[Finding]:
    lookup = look_up_bundle(bundle, word, request.source)
    if others := explain_not_served(bundle, lookup, word, request.level, request.source):
        return others  # a server would use another bundle
    lookup = ensure_files(lookup)
    if others := explain_other_weights(bundle, lookup):
        return others  # its tokens would say nothing about the bundle
    return start.check_start(bundle, request.level, prepare_subject(lookup), request.replay)


def parse_replay(file: Path | None, concurrency: str, max_tokens: int) -> PromptSettings:
    """Parse the requests of a replay: the prompts of `file` (None: PROMPTS), and the numbers of requests in flight.

    `concurrency` is a list such as "1,8". Raises UsageError.
    """
    try:
        counts = sorted({int(word) for word in concurrency.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= MOST:
        raise UsageError(
            f"invalid --concurrency {concurrency!r}: expected numbers from 1 to {MOST}",
            hint="--concurrency 1,8",
        )
    asked = answers.read_prompts(file) if file is not None else answers.PROMPTS
    return PromptSettings(asked, max_tokens, crowds=[count for count in counts if count > 1])


def _check_request(request: ValidationRequest) -> None:
    if request.level in checks.STARTING:
        return
    pinned = [word for word in request.words if not resolver.names_model(word)]
    if pinned and request.source.vllm_args:
        raise UsageError(
            f"cannot use arguments after --: level {request.level} starts no server, and {pinned[0]} is not a model",
            hint="--level load",
        )
    if request.source.model is not None:
        raise UsageError(f"cannot use --model: level {request.level} starts no server", hint="--level load")


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
