"""Select one of several versions: readable before unreadable, then trusted before untrusted, then the newest.

The signature covers the build time, so an old signed bundle that is copied again remains old. The version counts arrivals
in this store and only breaks ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle, Trust, TrustResult
from coldstart.artifacts.errors import BundleError

_UNJUDGED = TrustResult(True, None, "nobody asked")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Bundle with its rank; `problem` is the reason why it cannot be read here."""

    bundle: Bundle
    created: str
    trust: TrustResult
    problem: BundleError | None = None

    @property
    def rank(self) -> tuple[bool, bool, str, int]:
        """Return the rank; a larger one is better."""
        return self.problem is None, self.trust.ok, self.created, self.bundle.version


def rank_bundle(bundle: Bundle, trust: Trust | None) -> Candidate:
    """Return `bundle` with its rank; without `trust` all are equally trusted."""
    try:
        created = bundle.manifest.provenance.created
        return Candidate(bundle, created, trust(bundle) if trust else _UNJUDGED)
    except BundleError as error:
        return Candidate(bundle, "", TrustResult(False, None, error.message), error)


def best_first(bundles: Iterable[Bundle], trust: Trust | None) -> list[Candidate]:
    """Return all candidates, the best first."""
    return sorted((rank_bundle(bundle, trust) for bundle in bundles), key=lambda one: one.rank, reverse=True)


def describe_choice(bundle: Bundle, versions: Sequence[Bundle], trust: Trust | None) -> str:
    """Return which of the `versions` the best one, `bundle`, is: the newest, or the newest readable or trusted."""
    ranked = best_first(versions, trust)
    chosen = next(one for one in ranked if one.bundle == bundle)
    if chosen.problem is None and ranked[-1].problem is not None:
        what = "newest readable"
    elif any((one.created, one.bundle.version) > (chosen.created, bundle.version) for one in ranked):
        what = "newest trusted"
    else:
        what = "newest"
    return f"{bundle.name}:v{bundle.version}, the {what} of {len(versions)}"


def newer_than(bundle: Bundle, others: Iterable[Bundle], trust: Trust | None) -> list[Bundle]:
    """Return the trusted bundles of `others` with the same key that are newer than `bundle`."""
    same = [other for other in others if other != bundle and other.key_digest == bundle.key_digest]
    created = rank_bundle(bundle, None).created
    return [one.bundle for one in best_first(same, trust) if one.trust.ok and one.created > created]


def superseded(bundles: Sequence[Bundle], keep: int, trust: Trust | None) -> set[str]:
    """Return the digests of all but the best `keep` of each key. Unreadable bundles are retained for another release."""
    keys: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        if rank_bundle(bundle, None).problem is None:
            keys.setdefault(bundle.key_digest, []).append(bundle)
    ordered = (best_first(group, trust) for group in keys.values())
    return {one.bundle.digest for group in ordered for one in group[keep:]}
