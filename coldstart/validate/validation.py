"""Run `coldstart validate`: find the bundle of each target and check it.

A target is a bundle reference, or a model whose bundle is looked up by the key of the model and its vLLM arguments. Servers
start with the model and arguments of the bundle.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import compare_keys
from coldstart.errors import UsageError
from coldstart.models import inspection, keys, resolution, resolver
from coldstart.models.inspection import BundleLookup
from coldstart.system import secrets
from coldstart.system.paths import Cache
from coldstart.validate import checks, responses, start
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.responses import PromptSettings
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights

MAX_CONCURRENCY = 256
NOT_SERVED = "CS-NOT-SERVED"
OTHER_WEIGHTS = "CS-OTHER-WEIGHTS"


@dataclass(frozen=True)
class Source:
    """Model and arguments of the servers to start.

    If `vllm_args` is not given, servers get the arguments that the bundle was built with. `model` is required for a
    bundle of a local model directory, because bundles do not record paths.
    """

    vllm_args: Sequence[str] = ()
    model: str | None = None
    revision: str | None = None
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)


@dataclass(frozen=True)
class ValidationRequest:
    """Bundle references or models to validate, and how to validate them.

    `source` is the model and arguments of the servers, and `replay` the requests to send to them. With `against_machine`,
    the bundle's key is also compared with this machine's hardware and versions.
    """

    targets: Sequence[str]
    level: checks.Level = "checksum"
    source: Source = field(default_factory=Source)
    replay: PromptSettings = start.REPLAY_SETTINGS
    against_machine: bool = False


def validate_all(request: ValidationRequest) -> list[checks.ValidationReport]:
    """Check each target of the request, and return one report per target, in the same order.

    Raises BundleNotFoundError or NoBundleError if a target has no bundle, UsageError for contradictory options or
    rejected prompts, and the errors of `resolution.resolve` and `resolution.ensure_weights`.
    """
    _check_request(request)
    found = [(target, find_bundle(target, request.source)) for target in request.targets]
    machine = keys.read_machine_fields() if request.against_machine else None
    reports = []
    for target, bundle in found:
        report = checks.check_bundle(bundle, request.level, machine)
        if request.level in checks.SERVER_LEVELS and not report.fails("error"):
            report = replace(report, findings=(*report.findings, *_check_start(bundle, target, request)))
        reports.append(report)
    return reports


def _check_start(bundle: Bundle, target: str, request: ValidationRequest) -> list[Finding]:
    lookup = look_up_bundle(bundle, target, request.source)
    if findings := explain_not_served(bundle, lookup, target, request.level, request.source):
        return findings  # a server would use a different bundle
    if lookup.model.repo_id is not None:
        model = resolution.ensure_weights(lookup.model, offline=lookup.offline)
        lookup = replace(lookup, model=model)
    if findings := explain_other_weights(bundle, lookup):
        return findings  # tokens of different weights cannot be compared
    return start.check_start(bundle, request.level, prepare_subject(lookup), request.replay)


def parse_replay(file: Path | None, concurrency: str, max_tokens: int) -> PromptSettings:
    """Parse the options of a replay: the prompts of `file` (default: PROMPTS) and numbers of concurrent requests.

    `concurrency` is a comma-separated list such as "1,8". Raises UsageError.
    """
    try:
        counts = sorted({int(target) for target in concurrency.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= MAX_CONCURRENCY:
        raise UsageError(
            f"invalid --concurrency {concurrency!r}: expected comma-separated numbers from 1 to {MAX_CONCURRENCY}",
            hint="use --concurrency 1,8",
        )
    prompts = responses.read_prompts(file) if file is not None else responses.PROMPTS
    return PromptSettings(prompts, max_tokens, concurrency_levels=[count for count in counts if count > 1])


def _check_request(request: ValidationRequest) -> None:
    if request.level in checks.SERVER_LEVELS:
        return
    pinned = [target for target in request.targets if not resolver.can_be_model(target)]
    if pinned and request.source.vllm_args:
        raise UsageError(
            f"cannot use arguments after --: {pinned[0]} is a bundle, and --level {request.level} starts no server",
            hint="use --level load",
        )
    if request.source.model is not None:
        raise UsageError(
            f"cannot use --model: --level {request.level} starts no server", hint="use --level load"
        )


def find_bundle(target: str, source: Source) -> Bundle:
    """Find the bundle of `target`. Raises the errors of `resolver.find_bundle`."""
    vllm_args = () if source.model is not None else source.vllm_args
    revision = None if source.model is not None else source.revision
    return resolver.find_bundle(
        target, vllm_args, cache=source.cache, offline=source.offline, revision=revision
    )


def look_up_bundle(bundle: Bundle, target: str, source: Source) -> BundleLookup:
    """Look up the model and arguments of `bundle`, as `serve` does. `target` is the user's argument.

    Raises UsageError if the model is a directory and `source` does not specify it, and the errors of
    `resolution.resolve`.
    """
    provenance = bundle.manifest.provenance
    model_name = source.model or (target if resolver.can_be_model(target) else provenance.model_name)
    commit = bundle.key.fields.get("model.revision")
    revision = None if resolution.is_local_model(model_name) or not isinstance(commit, str) else commit
    try:
        return inspection.look_up(
            model_name,
            source.vllm_args or provenance.arguments,
            cache=source.cache,
            offline=source.offline,
            revision=revision or source.revision,
        )
    except UsageError as error:
        if model_name != provenance.model_name or resolution.is_repo_id(model_name):
            raise
        raise UsageError(
            f"cannot find the model of {bundle.ref}: the bundle has only the name of the directory, {provenance.model_name}",
            hint=f"run `coldstart validate {provenance.model_name} --model DIR --level replay`",
        ) from error


def explain_not_served(
    bundle: Bundle, lookup: BundleLookup, target: str, level: Level, source: Source
) -> list[Finding]:
    """Return a finding if a server with this model and these arguments would not use `bundle`, or none if it would.

    The hint is built from the user's arguments `target`, `level` and `source`.
    """
    if lookup.bundle is not None and lookup.bundle.digest == bundle.digest:
        return []
    if differing := compare_keys(lookup.key, bundle.key):
        listed = "; ".join(f"{one.field}: expected {one.wanted}, found {one.found}" for one in differing)
        message, hint = (
            f"this model with these arguments has another key on this machine: {listed}",
            "specify the model and arguments that the bundle was built with",
        )
    elif lookup.bundle is not None:
        message = f"a server would use {lookup.bundle.ref}, a different version with the same key"
        hint = _format_validate(lookup.bundle.ref, level, source)
    else:
        error = inspection.build_miss_error(lookup)
        message, hint = error.message, error.hint or ""
        if lookup.untrusted is not None:
            # Do not repeat the bundle's own arguments, which may name code to load: repeat only the user's.
            again = _format_validate(target, level, source)
            hint = f"run `coldstart trust add FILE` (its publisher's public key), then `{again}`"
    return [Finding(NOT_SERVED, "error", message, hint, "serve")]


def explain_other_weights(bundle: Bundle, lookup: BundleLookup) -> list[Finding]:
    """Return a finding if the model's weights differ from the bundle's weights, or none if the tensors are equal.

    A server would use the bundle with such weights, but its tokens would differ. Hashes of weights are cached.
    """
    directory, weights_cache = lookup.model.path, lookup.cache.weights
    if (
        directory is None
        or lookup.vllm_args.get_value("load_format") == "dummy"
        or not bundle.has_section("weights")
    ):
        return []
    try:
        known = checkpoint.parse(cast("dict[str, Any]", bundle.read_json("weights"))).document()
    except checkpoint.InvalidWeightsPlanError:
        return []  # unusable, but reported by `serve --weights-from`
    if weights.read_or_compute_digest(directory, weights_cache) == weights.compute_digest(known):
        return []
    if not (differing := weights.find_difference(known, weights.build_plan(directory, weights_cache))):
        return []
    return [
        Finding(
            OTHER_WEIGHTS,
            "error",
            f"the weights of {lookup.model.cli_argument} differ from those of the bundle {bundle.ref}: {differing} differs",
            f"use the bundle's weights, or build a bundle of these weights: {lookup.format_command('materialize', '--force')}",
            "weights",
        )
    ]


def _format_validate(target: str, level: Level, source: Source) -> str:
    arguments = ["coldstart", "validate", target, "--level", level]
    arguments += ["--model", source.model] if source.model is not None else []
    arguments += ["--revision", source.revision] if source.revision is not None else []
    return shlex.join(
        [*arguments, *(["--", *secrets.redact_arguments(source.vllm_args)] if source.vllm_args else [])]
    )


def prepare_subject(lookup: BundleLookup) -> ModelUnderTest:
    """Return the model to launch for a lookup."""
    model = lookup.model
    common = ("--cache-dir", str(lookup.cache.root), *(["--offline"] if lookup.offline else []))
    target, revision = str(model.path or model.repo_id), model.revision if model.repo_id is not None else None
    return ModelUnderTest(model.cli_argument, target, tuple(lookup.vllm_args), common, revision)
