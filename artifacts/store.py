"""Store of bundles: an OCI image layout that many processes read and write at the same time.

A reader needs no write permission and takes no lock. Versions of a model's name increase and remain until they are pruned.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from coldstart.artifacts import files, oci
from coldstart.artifacts.bundle import Bundle, Trust, best_first
from coldstart.artifacts.errors import NO_BUNDLE, AmbiguousReferenceError, BundleError, InvalidReferenceError
from coldstart.artifacts.key import Key, Mismatch, diff
from coldstart.artifacts.oci_layout import OciLayout, is_bundle

if TYPE_CHECKING:
    # Modules of writers are imported in functions, because readers start servers and must be fast.
    from coldstart.artifacts.oci_layout import BundleSource
    from coldstart.artifacts.prune import PruneReport
    from coldstart.artifacts.writer import Draft
Bundles = list[Bundle]
Mismatches = list[Mismatch]
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_PREFIX = re.compile(r"sha256:[0-9a-f]{12,64}")
_VERSIONED = re.compile(r"(?P<name>[^@]+?):v(?P<version>[1-9]\d{0,8})")


class BundleNotFoundError(BundleError):
    """Missing bundle: none, or no trusted one, has the wanted key or reference.

    `nearest` is the most similar bundle of the same model, `untrusted` the newest of the wanted key; None if there is none.
    """

    exit_code = NO_BUNDLE
    code: ClassVar[str] = "CS-NOTFOUND"
    default_hint: ClassVar[str] = (
        "build the bundle: coldstart materialize MODEL; or fetch it: coldstart pull ADDRESS"
    )

    def __init__(
        self,
        message: str,
        nearest: tuple[Bundle, Mismatches] | None = None,
        untrusted: Bundle | None = None,
        *,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.nearest, self.untrusted = nearest, untrusted


class Store:
    """Directory of bundles. Nothing is opened or created before a method needs it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.layout = OciLayout(self.root)

    @contextmanager
    def begin(self, key: Key) -> Iterator[Draft]:
        """Open a draft for `key`.

        A draft that is not published when the block ends is discarded. Raises ReadOnlyStoreError, NoSpaceError.
        """
        from coldstart.artifacts.writer import Draft, staging

        with staging(self.layout) as place:
            yield Draft(key, place)

    @contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Hold the lock of the key: one of several processes builds the bundle, and the others wait and find it.

        publish() does not need it. Raises ReadOnlyStoreError.
        """
        self.layout.create()
        with files.locked(self.layout.private / "locks" / f"{key.digest.removeprefix('sha256:')}.lock"):
            yield

    def list(self) -> Bundles:
        """Return every bundle in order of publication, without opening a manifest that the index describes."""
        return [
            Bundle(self.layout, entry) for entry in self.layout.entries() if is_bundle(self.layout, entry)
        ]

    def find(self, key: Key, *, name: str | None = None, trust: Trust | None = None) -> Bundle:
        """Return the newest version for `key` that `trust` accepts (None: every signer) and this release can read.

        With `name`, bundles of that name also count as the same model. Raises BundleNotFoundError, and the error of
        Bundle.manifest
        if no version can be read.
        """
        candidates = [bundle for bundle in self.list() if bundle.identity[1] == key.digest]
        if not candidates:
            raise BundleNotFoundError(f"no bundle for key {key.short}", self._nearest(key, name, trust))
        best = best_first(candidates, trust)[0]
        if best.problem is not None:
            raise best.problem
        if not best.trust.ok:
            message = f"no trusted bundle for key {key.short}: {best.trust.reason}"
            raise BundleNotFoundError(message, self._nearest(key, name, trust), best.bundle)
        return best.bundle

    def get(self, ref: str, *, trust: Trust | None = None, one_key: bool = False) -> Bundle:
        """Return the bundle for NAME, NAME:vN, NAME@sha256:..., a ref name, or a manifest or key digest prefix.

        A digest prefix has at least 12 hex digits. Of several versions the best: one that `trust` accepts before one that
        it does not. With `one_key`, a NAME whose versions have several keys is ambiguous. Raises BundleNotFoundError,
        AmbiguousReferenceError, or InvalidReferenceError.
        """
        bundles = self.list()
        matches = self._matching(ref, bundles)
        if not matches:
            known = (
                "see the bundles of this store: coldstart list; or fetch it: coldstart pull ADDRESS"
                if bundles
                else None
            )
            archive = f"coldstart import {shlex.quote(ref)}" if files.is_file(ref) else None
            name = ref.partition("@")[0] if "@" in ref else ref.rpartition(":")[0]
            versions = sorted({bundle.version for bundle in bundles if bundle.identity[0] == name})
            existing = f": {name} has {', '.join(f'v{one}' for one in versions)}" if versions else ""
            raise BundleNotFoundError(f"no bundle matches {ref!r}{existing}", hint=archive or known)
        if len(matches) > 1 and not _newest_wins(ref, matches, one_key):
            lines = [f"{ref!r} names {len(matches)} bundles", *map(_choice, matches)]
            raise AmbiguousReferenceError(lines)
        return best_first(matches, trust)[0].bundle if len(matches) > 1 else matches[0]

    def prune(
        self,
        keep: int | None = 1,
        *,
        drop: Sequence[Bundle] = (),
        dry_run: bool = False,
        trust: Trust | None = None,
    ) -> PruneReport:
        """Retain the best `keep` versions of each key (None: all) except `drop`; remove files that nothing refers to.

        A bundle that `trust` accepts is better than any that it does not. Raises ReadOnlyStoreError.
        """
        from coldstart.artifacts import prune

        return prune.prune(self.layout, keep, drop, trust, dry_run=dry_run)

    def receive(self, source: BundleSource, descriptor: oci.Descriptor) -> Bundle:
        """Copy a bundle from another store, an archive, a registry or the hub."""
        from coldstart.artifacts.writer import receive

        return receive(self.layout, source, descriptor)

    def _matching(self, ref: str, bundles: Sequence[Bundle]) -> Bundles:
        if "@" in ref:
            name, _, digest = ref.partition("@")
            if not _PREFIX.fullmatch(digest):
                raise InvalidReferenceError(f"{ref!r} does not end with sha256: and at least 12 hex digits")
            return [b for b in bundles if b.identity[0] == name and b.digest.startswith(digest)]
        if named := _by_name(ref, bundles):
            return named
        if matched := _HEX.fullmatch(ref):
            prefix = f"sha256:{matched[1]}"
            return [b for b in bundles if b.digest.startswith(prefix) or b.identity[1].startswith(prefix)]
        if not ref or not ref.isprintable():
            raise InvalidReferenceError(f"{ref!r} is not a reference")
        return []

    def _nearest(self, key: Key, name: str | None, trust: Trust | None) -> tuple[Bundle, Mismatches] | None:
        candidates = []
        for bundle in self.list():
            try:
                found = bundle.key
            except BundleError:
                continue  # validate reports a damaged bundle
            if found != key and _same_model(key, name, bundle) and (trust is None or trust(bundle).ok):
                candidates.append((bundle, diff(key, found)))
        return min(candidates, key=lambda pair: len(pair[1]), default=None)


def _newest_wins(ref: str, matches: Sequence[Bundle], one_key: bool) -> bool:
    """Return whether `ref` is a name, or the prefix of one key."""
    identities = [bundle.identity for bundle in matches]
    several_keys = len({key for _, key in identities}) > 1
    if all(name == ref for name, _ in identities):
        return not (several_keys and one_key)
    prefix = _HEX.fullmatch(ref)
    return not several_keys and prefix is not None and identities[0][1].startswith(f"sha256:{prefix[1]}")


def _by_name(ref: str, bundles: Sequence[Bundle]) -> Bundles:
    if named := [b for b in bundles if ref in (b.identity[0], b.descriptor.annotations.get(oci.REF_NAME))]:
        return named
    if matched := _VERSIONED.fullmatch(ref):
        return [
            b for b in bundles if b.identity[0] == matched["name"] and b.version == int(matched["version"])
        ]
    return []


def _choice(bundle: Bundle) -> str:
    """Return a version, its reference by digest, and the arguments that tell it from others of its name."""
    try:
        recorded = " ".join(bundle.manifest.provenance.arguments) or "no arguments"
    except BundleError as error:
        recorded = error.message
    return f"{bundle.identity[0] or '?'}:v{bundle.version}  {bundle.identity[0]}@{bundle.digest[:19]}  {recorded}"


def _same_model(key: Key, name: str | None, bundle: Bundle) -> bool:
    if name is not None and bundle.name == name:
        return True
    model = {field: value for field, value in key.fields.items() if field.startswith("model.")}
    if "model.name" in model:
        return bundle.key.fields.get("model.name") == model["model.name"]
    return any(bundle.key.fields.get(field) == value for field, value in model.items())
