"""One validation from request to reports: find the bundles, mend what is to be mended, check each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.artifacts import remote
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from coldstart.errors import Usage
from coldstart.machine.paths import Cache
from coldstart.model import models
from coldstart.validate import against, checks

HOST = "host"


@dataclass(frozen=True)
class ValidationRequest:
    """What to validate. `against` is "host" or the name of a fingerprint file; `vllm_args` override the
    arguments that the bundle was made with, for load and replay.
    """

    refs: Sequence[str]
    level: checks.Level = "checksum"
    against: str | None = None
    repair: bool = False
    repair_from: Sequence[str] = ()
    vllm_args: Sequence[str] = ()
    offline: bool = False
    cache: Cache = field(default_factory=Cache.at)


def run(store: Store, request: ValidationRequest) -> list[checks.ValidationReport]:
    """One report per reference.

    Raises NotFound for a reference that names no bundle, Usage for an unreadable fingerprint.
    """
    validation = checks.Validation(request.level, _fingerprint(request.against), _starter(request))
    return [_one(store, store.get(ref), validation, request) for ref in request.refs]


def _one(
    store: Store, bundle: Bundle, validation: checks.Validation, request: ValidationRequest
) -> checks.ValidationReport:
    if not request.repair and not request.repair_from:
        return validation.run(bundle)
    sources = [remote.source(address) for address in request.repair_from]
    notes = checks.repair(store, bundle, sources)
    # What was read before the repair may be the damaged bytes: open it anew.
    fresh = Bundle(store, bundle.descriptor, bundle.version)
    return checks.with_notes(validation.run(fresh), notes)


def _fingerprint(wanted: str | None) -> dict[str, checks.Scalar] | None:
    if wanted is None:
        return None
    return against.host() if wanted == HOST else against.load(Path(wanted))


def _starter(request: ValidationRequest) -> checks.StartCheck | None:
    if request.level not in ("load", "replay"):
        return None
    from coldstart.measure.bench.launchers import Subject
    from coldstart.validate.graphs import with_graphs
    from coldstart.validate.start import Starts, real_pair

    def subject(bundle: Bundle) -> Subject:
        provenance = bundle.manifest.provenance
        model = models.resolve(provenance.model_name, offline=request.offline, cache=request.cache)
        arguments = tuple(request.vllm_args or provenance.arguments)
        target = str(model.path or model.repo_id)
        return Subject(model.argument, target, arguments, _common_arguments(request))

    return with_graphs(Starts(real_pair(subject)))


def _common_arguments(request: ValidationRequest) -> tuple[str, ...]:
    cache = ("--cache-dir", str(request.cache.root))
    return (*cache, "--offline") if request.offline else cache


def check_request(request: ValidationRequest) -> None:
    """Raises Usage for options that mean nothing together."""
    if request.vllm_args and request.level not in ("load", "replay"):
        raise Usage(f"level {request.level} starts no server, so nothing may follow --.", mend="--level load")
