"""Resolve the word MODEL or REF of a command, for all commands: to the start of a server, or to one bundle.

A bundle records the arguments of its materialization. Arguments can name code to load, so only those of a trusted bundle are
used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle, Candidate, Trust, anyone, best_first
from coldstart.artifacts.errors import InvalidReferenceError
from coldstart.artifacts.key import diff
from coldstart.artifacts.store import BundleNotFoundError, Store
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.models import inspection, keys, resolution
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache

_VERSION_OR_DIGEST = re.compile(r".+(:v[1-9]\d*|@sha256:[0-9a-f]+)")
_WEIGHTS = "model.weights"


def resolve(
    word: str,
    vllm_args: Sequence[str] | None = (),
    *,
    cache: Cache,
    offline: bool = False,
    revision: str | None = None,
    accepts: Trust | None = None,
) -> Lookup:
    """Look up the model, or the one version of a bundle, that `word` names, for a server that is to start.

    With None as `vllm_args`, the arguments are those that the bundle records.

    Raises the errors of `inspection.look_up`, BundleNotFoundError and AmbiguousReferenceError.
    """
    given = None if vllm_args is None else Arguments(vllm_args)
    if bundle := find_versioned(Store(cache.bundles), word):
        return _look_up_version(bundle, given, cache, offline, revision, accepts)
    asked = inspection.look_up(
        word, given or (), cache=cache, offline=offline, revision=revision, accepts=accepts
    )
    return adopt_arguments(asked) if given is None else asked


def find_bundle(
    word: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache,
    offline: bool = False,
    revision: str | None = None,
    asks_hub: bool = False,
) -> Bundle:
    """Find the bundle that a reference names, or that of a model with these arguments; a trusted one before others.

    With `asks_hub`, a name that no bundle has can be a model of the hub.

    Raises the errors of `Store.get` and of `inspection.look_up`, and NoBundleError.
    """
    if not ((vllm_args or revision) and names_model(word)):
        try:
            return Store(cache.bundles).get(word, trust=inspection.trust)
        except (BundleNotFoundError, InvalidReferenceError):
            is_model = inspection.names_model(word) or (asks_hub and not _VERSION_OR_DIGEST.fullmatch(word))
            if files.is_file(word) or not is_model:
                raise
    asked = inspection.look_up(word, vllm_args, cache=cache, offline=offline, revision=revision)
    if asked.bundle is None:  # a bundle that is only read need not be trusted
        asked = replace(asked, accepts=anyone).refresh()
    if asked.bundle is None:
        raise inspection.miss(asked)
    return asked.bundle


def names_model(word: str) -> bool:
    """Return whether a word can be a model: a known one, or a repository. A reference with a version is neither."""
    return inspection.names_model(word) or resolution.is_repo_id(word)


def adopt_arguments(asked: Lookup) -> Lookup:
    """Return the lookup with the arguments of the newest trusted bundle of its model for this machine.

    `asked` has no arguments. If no trusted bundle fits, return `asked`; its `untrusted` is then the best bundle that would fit
    if this user trusted it.
    """
    readable = [one for one in _rank_bundles(asked) if one.problem is None]
    for one in readable:
        if one.trust.ok and (found := _adopt_from(asked, one.bundle)) is not None:
            return found.refresh()
    if asked.bundle is not None or asked.untrusted is not None or asked.accepts is not None:
        return asked
    distrusted = (one.bundle for one in readable if not one.trust.ok)
    fits = (one for one in distrusted if inspection.differ_in_arguments(diff(asked.key, one.key)))
    return replace(asked, untrusted=next(fits, None))


def _adopt_from(asked: Lookup, bundle: Bundle) -> Lookup | None:
    """Return the lookup with the arguments of a bundle, None if they do not give its key on this machine."""
    if (arguments := inspection.read_arguments(bundle)) is None:
        return None
    key = keys.replace_arguments(asked.key, arguments)
    # A model directory without weights has none in its key: they are fetched from elsewhere.
    if all(one.field == _WEIGHTS and one.wanted is None for one in diff(key, bundle.key)):
        return replace(asked, vllm_args=arguments, key=key, lender=bundle)
    return None


def find_versioned(store: Store, word: str) -> Bundle | None:
    """Return the bundle that NAME:vN or NAME@sha256:... names, None for any other word, which names a model.

    Raises BundleNotFoundError and AmbiguousReferenceError.
    """
    if inspection.names_model(word) or not _VERSION_OR_DIGEST.fullmatch(word):
        return None
    return store.get(word)


def _look_up_version(
    bundle: Bundle,
    given: Arguments | None,
    cache: Cache,
    offline: bool,
    revision: str | None,
    accepts: Trust | None,
) -> Lookup:
    """Look up this version of a bundle, with the arguments `given`, or those that the bundle records if `given` is None.

    Raises UsageError for the bundle of a directory, whose path it does not record, and the errors of `resolution.resolve`.
    """
    name, commit = bundle.manifest.provenance.model_name, bundle.key.fields.get("model.revision")
    if not names_model(name):
        raise UsageError(
            f"cannot start {bundle.ref}: its model is a directory called {name}, whose path the bundle does not record",
            hint="specify the directory: coldstart serve DIR",
        )
    if isinstance(commit, str) and not resolution.is_local(name):
        revision = revision or commit
    arguments = given if given is not None else inspection.read_arguments(bundle)
    asked = inspection.look_up(
        name, arguments or (), cache=cache, offline=offline, revision=revision, accepts=accepts
    )
    asked = replace(asked, bundle=None, nearest=None, mismatches=(), untrusted=None, notes=())
    if asked.key != bundle.key:
        return replace(asked, nearest=bundle, mismatches=tuple(diff(asked.key, bundle.key)))
    if not (accepts or inspection.trust)(bundle).ok:
        return replace(asked, untrusted=bundle)
    notes = tuple(inspection.describe_distrust(bundle))
    return replace(asked, bundle=bundle, lender=bundle if given is None else None, notes=notes)


def _rank_bundles(asked: Lookup) -> list[Candidate]:
    """Return the bundles of the model, the newest trusted one first."""
    named = [bundle for bundle in asked.store.list() if bundle.identity[0] == asked.model.name]
    return best_first(named, inspection.trust)
