"""Which of several versions is taken: one that can be read, then one that is trusted, then the one made last.

The time of making is part of what is signed, so that an old signed bundle that is taken over once more stays old; the version
counts arrivals in this store and only breaks ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle, Trust, TrustResult
from coldstart.artifacts.errors import BundleError

_UNJUDGED = TrustResult(True, None, "nobody asked")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bundle and what speaks for it; `problem` says why it cannot be read here."""

    bundle: Bundle
    created: str
    trust: TrustResult
    problem: BundleError | None = None

    @property
    def rank(self) -> tuple[bool, bool, str, int]:
        """The larger, the better."""
        return self.problem is None, self.trust.ok, self.created, self.bundle.version


def judged(bundle: Bundle, trust: Trust | None) -> Candidate:
    """`bundle` with its rank; without `trust` all are trusted alike."""
    try:
        created = bundle.manifest.provenance.created
        return Candidate(bundle, moment(created), trust(bundle) if trust else _UNJUDGED)
    except BundleError as error:
        return Candidate(bundle, "", TrustResult(False, None, error.message), error)


def best_first(bundles: Iterable[Bundle], trust: Trust | None) -> list[Candidate]:
    """All of them, the one to take first."""
    return sorted((judged(bundle, trust) for bundle in bundles), key=lambda one: one.rank, reverse=True)


def newer_than(bundle: Bundle, others: Iterable[Bundle], trust: Trust | None) -> list[Bundle]:
    """Which of the `others` that are trusted have the same key and were made later: taking `bundle` is going back."""
    same = [other for other in others if other != bundle and other.key_digest == bundle.key_digest]
    created = judged(bundle, None).created
    return [one.bundle for one in best_first(same, trust) if one.trust.ok and one.created > created]


def superseded(bundles: Sequence[Bundle], keep: int, trust: Trust | None) -> set[str]:
    """Digests of all but the best `keep` of each key. What cannot be read belongs to another release, and stays."""
    keys: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        if judged(bundle, None).problem is None:
            keys.setdefault(bundle.key_digest, []).append(bundle)
    ordered = (best_first(group, trust) for group in keys.values())
    return {one.bundle.digest for group in ordered for one in group[keep:]}


def moment(created: str) -> str:
    """An ISO 8601 time in UTC in a form that sorts: seconds, then nine digits of their fraction."""
    seconds, fraction = created[:19], created[19:].removesuffix("Z").removesuffix("+00:00").removeprefix(".")
    return f"{seconds}.{fraction:0<9}"
