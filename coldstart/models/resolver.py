"""Resolve the argument MODEL or REF of a command to a model lookup or to a bundle.

A bundle records the arguments of its materialization. Arguments can load code, so only the arguments of a trusted bundle
are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle, TrustCheck, accept_any, sort_best_first
from coldstart.artifacts.errors import InvalidReferenceError
from coldstart.artifacts.key import compare_keys
from coldstart.artifacts.store import BundleNotFoundError, Store
from coldstart.errors import UsageError
from coldstart.models import inspection, keys, resolution
from coldstart.models.inspection import BundleLookup
from coldstart.system.paths import Cache

_VERSION_OR_DIGEST = re.compile(r".+(:v[1-9]\d*|@sha256:[0-9a-f]+)")
_WEIGHTS = "model.weights"


def look_up_for_start(
    word: str,
    vllm_args: Sequence[str] | None = (),
    *,
    cache: Cache,
    offline: bool = False,
    revision: str | None = None,
    accepts: TrustCheck | None = None,
) -> BundleLookup:
    """Look up the model or bundle version `word` for a server start.

    If `vllm_args` is None, use the arguments that the bundle records.

    Raises the errors of `inspection.look_up`, BundleNotFoundError and AmbiguousReferenceError, and UsageError for the
    bundle of a model directory, because the bundle does not record the path of the directory.
    """
    is_version = not resolution.is_known_model(word) and _VERSION_OR_DIGEST.fullmatch(word)
    if bundle := Store(cache.bundles).find_by_reference(word) if is_version else None:
        word, commit = bundle.manifest.provenance.model_name, bundle.key.fields.get("model.revision")
        if not can_be_model(word):
            raise UsageError(
                f"cannot start {bundle.ref}: its model is a directory called {word}, whose path the bundle does not record",
                hint="specify the directory: coldstart serve DIR",
            )
        if isinstance(commit, str) and not resolution.is_local_model(word):
            revision = revision or commit
    typed = inspection.read_recorded_arguments(bundle) if bundle and vllm_args is None else vllm_args
    lookup = inspection.look_up(
        word, typed or (), cache=cache, offline=offline, revision=revision, accepts=accepts, bundles=()
    )
    if bundle is not None:
        return _take_version(lookup, bundle, records_arguments=vllm_args is None)
    return _adopt_recorded_arguments(lookup) if vllm_args is None else lookup.refresh()


def _take_version(lookup: BundleLookup, bundle: Bundle, *, records_arguments: bool) -> BundleLookup:
    """Return the lookup with this bundle version, whose arguments it has if `records_arguments` is set."""
    if lookup.key != bundle.key:
        return replace(lookup, nearest=bundle, mismatches=tuple(compare_keys(lookup.key, bundle.key)))
    if not (lookup.accepts or inspection.trust)(bundle).is_trusted:
        return replace(lookup, untrusted=bundle)
    notes = tuple(inspection.describe_distrust(bundle))
    return replace(lookup, bundle=bundle, arguments_bundle=bundle if records_arguments else None, notes=notes)


def find_bundle(
    word: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache,
    offline: bool = False,
    revision: str | None = None,
    asks_hub: bool = False,
) -> Bundle:
    """Find the bundle by its reference, or by model and arguments. Trusted bundles take precedence.

    With `asks_hub`, a name that matches no bundle can be a hub model.

    Raises the errors of `Store.find_by_reference` and of `inspection.look_up`, and NoBundleError.
    """
    if not ((vllm_args or revision) and can_be_model(word)):
        try:
            return Store(cache.bundles).find_by_reference(word, trust=inspection.trust)
        except (BundleNotFoundError, InvalidReferenceError):
            is_model = resolution.is_known_model(word) or (
                asks_hub and not _VERSION_OR_DIGEST.fullmatch(word)
            )
            if files.is_existing_file(word) or not is_model:
                raise
    lookup = inspection.look_up(word, vllm_args, cache=cache, offline=offline, revision=revision)
    if lookup.bundle is None:  # a bundle that is only read need not be trusted
        lookup = replace(lookup, accepts=accept_any).refresh()
    if lookup.bundle is None:
        raise inspection.build_miss_error(lookup)
    return lookup.bundle


def can_be_model(word: str) -> bool:
    """Return whether `word` can be a model: it is known locally, or is a repository ID and not a reference with a version."""
    return resolution.is_known_model(word) or resolution.is_repo_id(word)


def _adopt_recorded_arguments(lookup: BundleLookup) -> BundleLookup:
    """Look up the bundle for the arguments of the newest trusted bundle of the model for this machine.

    `lookup` has no arguments. If no trusted bundle fits, look up the bundle for no arguments, and set `untrusted` to the best
    untrusted bundle that fits.
    """
    bundles = lookup.store.list_bundles()
    named = [bundle for bundle in bundles if bundle.identity[0] == lookup.model.name]
    readable = [one for one in sort_best_first(named, inspection.trust) if one.read_error is None]
    for candidate in readable:
        if (
            not candidate.trust.is_trusted
            or (arguments := inspection.read_recorded_arguments(candidate.bundle)) is None
        ):
            continue
        key = keys.replace_arguments(lookup.key, arguments)
        # A model directory without weights has none in its key: they are fetched from elsewhere.
        if all(
            field == _WEIGHTS and wanted is None
            for field, wanted, _ in compare_keys(key, candidate.bundle.key)
        ):
            adopted = replace(lookup, vllm_args=arguments, key=key, arguments_bundle=candidate.bundle)
            return adopted.refresh(bundles)
    lookup = lookup.refresh(bundles)
    if lookup.bundle is not None or lookup.untrusted is not None or lookup.accepts is not None:
        return lookup
    distrusted = (one.bundle for one in readable if not one.trust.is_trusted)
    fits = (
        one for one in distrusted if inspection.differ_only_in_arguments(compare_keys(lookup.key, one.key))
    )
    return replace(lookup, untrusted=next(fits, None))
