"""Bundle store: an OCI image layout that several processes can read and write at the same time.

Readers need no write permission and take no lock. The versions of a model name have increasing numbers, and are kept
until they are pruned.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from coldstart.artifacts import files, oci
from coldstart.artifacts.bundle import Bundle, TrustCheck, sort_best_first
from coldstart.artifacts.errors import NO_BUNDLE, AmbiguousReferenceError, BundleError, InvalidReferenceError
from coldstart.artifacts.key import FieldMismatch, Key, compare_keys
from coldstart.artifacts.oci_layout import BundleSource, OciLayout, is_bundle

if TYPE_CHECKING:
    # Modules of writers are imported in functions, because readers start servers and must be fast.
    from coldstart.artifacts.writer import BundleDraft
Bundles = list[Bundle]
Mismatches = list[FieldMismatch]
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_PREFIX = re.compile(r"sha256:[0-9a-f]{12,64}")
_VERSIONED = re.compile(r"(?P<name>[^@]+?):v(?P<version>[1-9]\d{0,8})")


class BundleNotFoundError(BundleError):
    """Error for a key or reference that matches no bundle, or only untrusted bundles.

    `nearest` is the most similar bundle of the same model with its mismatches, and `untrusted` is the newest untrusted
    bundle with the wanted key. Both can be None.
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
    """Directory of bundles, which is opened or created only when a method needs it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.layout = OciLayout(self.root)

    @contextmanager
    def open_draft(self, key: Key) -> Iterator[BundleDraft]:
        """Open a draft of a bundle for `key`. A draft that has not been published when the block ends is discarded.

        Raises ReadOnlyStoreError, NoSpaceError.
        """
        from coldstart.artifacts.writer import BundleDraft, open_staging

        with open_staging(self.layout) as staging:
            yield BundleDraft(key, staging)

    def lock_key(self, key: Key) -> AbstractContextManager[None]:
        """Hold the lock of `key` during the block, so that only one process builds the bundle while other processes wait.

        BundleDraft.publish does not require the lock. Raises ReadOnlyStoreError.
        """
        self.layout.create()
        return files.hold_lock(
            self.layout.private_dir / "locks" / f"{key.digest.removeprefix('sha256:')}.lock"
        )

    def list_bundles(self) -> Bundles:
        """Return all bundles in order of publication. Manifests are opened only if the index does not describe them."""
        return [
            Bundle(self.layout, entry)
            for entry in self.layout.read_entries()
            if is_bundle(self.layout, entry)
        ]

    def find_by_key(
        self,
        key: Key,
        *,
        name: str | None = None,
        trust: TrustCheck | None = None,
        bundles: Sequence[Bundle] | None = None,
    ) -> Bundle:
        """Return the newest bundle for `key` that this version of coldstart can read and `trust` accepts (None: any signer).

        Bundles called `name` count as bundles of the same model in the error's `nearest`. `bundles` is the list of
        `list_bundles` if the caller has it. Raises BundleNotFoundError, and the error of Bundle.manifest if no version can be
        read.
        """
        bundles = self.list_bundles() if bundles is None else bundles
        candidates = [bundle for bundle in bundles if bundle.identity[1] == key.digest]
        if not candidates:
            raise BundleNotFoundError(
                f"the store has no bundle for key {key.short_digest}",
                _find_nearest(bundles, key, name, trust),
            )
        best = sort_best_first(candidates, trust)[0]
        if best.read_error is not None:
            raise best.read_error
        if not best.trust.is_trusted:
            message = f"the store has no trusted bundle for key {key.short_digest}: {best.trust.reason}"
            raise BundleNotFoundError(message, _find_nearest(bundles, key, name, trust), best.bundle)
        return best.bundle

    def find_by_reference(
        self, ref: str, *, trust: TrustCheck | None = None, require_one_key: bool = False
    ) -> Bundle:
        """Return the bundle for NAME, NAME:vN, NAME@sha256:..., a ref name, or a prefix of a manifest or key digest.

        A prefix has at least 12 hex digits. If several versions match, the newest version that `trust` accepts is
        returned, or else the newest. With `require_one_key`, a NAME whose versions have different keys is ambiguous.
        Raises BundleNotFoundError, AmbiguousReferenceError or InvalidReferenceError.
        """
        bundles = self.list_bundles()
        matches = self._match_reference(ref, bundles)
        if not matches:
            known = (
                "list the bundles of this store: coldstart list; or fetch the bundle: coldstart pull ADDRESS"
                if bundles
                else None
            )
            archive = f"coldstart import {shlex.quote(ref)}" if files.is_existing_file(ref) else None
            name = ref.partition("@")[0] if "@" in ref else ref.rpartition(":")[0]
            versions = sorted({bundle.version for bundle in bundles if bundle.identity[0] == name})
            existing = f": {name} has {', '.join(f'v{version}' for version in versions)}" if versions else ""
            raise BundleNotFoundError(f"no bundle matches {ref!r}{existing}", hint=archive or known)
        if len(matches) > 1 and not _selects_newest(ref, matches, require_one_key):
            lines = [f"{ref!r} matches {len(matches)} bundles", *map(_format_choice, matches)]
            raise AmbiguousReferenceError(lines)
        return sort_best_first(matches, trust)[0].bundle if len(matches) > 1 else matches[0]

    def receive_bundle(self, source: BundleSource, descriptor: oci.Descriptor) -> Bundle:
        """Copy a bundle from another store, an archive, a registry or the hub into this store, and return the copy."""
        from coldstart.artifacts.writer import receive_bundle

        return receive_bundle(self.layout, source, descriptor)

    def _match_reference(self, ref: str, bundles: Sequence[Bundle]) -> Bundles:
        if "@" in ref:
            name, _, digest = ref.partition("@")
            if not _PREFIX.fullmatch(digest):
                raise InvalidReferenceError(f"{ref!r} needs at least 12 hex digits after @sha256:")
            return [b for b in bundles if b.identity[0] == name and b.digest.startswith(digest)]
        if named := _find_by_name(ref, bundles):
            return named
        if matched := _HEX.fullmatch(ref):
            prefix = f"sha256:{matched[1]}"
            return [b for b in bundles if b.digest.startswith(prefix) or b.identity[1].startswith(prefix)]
        if not ref or not ref.isprintable():
            raise InvalidReferenceError(f"invalid bundle reference {ref!r}")
        return []


def _find_nearest(
    bundles: Iterable[Bundle], key: Key, name: str | None, trust: TrustCheck | None
) -> tuple[Bundle, Mismatches] | None:
    candidates = []
    for bundle in bundles:
        try:
            found = bundle.key
        except BundleError:
            continue  # The command `validate` reports damaged bundles.
        if found != key and _is_same_model(key, name, bundle) and (trust is None or trust(bundle).is_trusted):
            candidates.append((bundle, compare_keys(key, found)))
    return min(candidates, key=lambda pair: len(pair[1]), default=None)


def _selects_newest(ref: str, matches: Sequence[Bundle], one_key: bool) -> bool:
    """Return whether `ref` is a model name or a prefix of one key, and thus selects the newest version."""
    identities = [bundle.identity for bundle in matches]
    several_keys = len({key for _, key in identities}) > 1
    if all(name == ref for name, _ in identities):
        return not (several_keys and one_key)
    prefix = _HEX.fullmatch(ref)
    return not several_keys and prefix is not None and identities[0][1].startswith(f"sha256:{prefix[1]}")


def _find_by_name(ref: str, bundles: Sequence[Bundle]) -> Bundles:
    if named := [b for b in bundles if ref in (b.identity[0], b.descriptor.annotations.get(oci.REF_NAME))]:
        return named
    if matched := _VERSIONED.fullmatch(ref):
        return [
            b for b in bundles if b.identity[0] == matched["name"] and b.version == int(matched["version"])
        ]
    return []


def _format_choice(bundle: Bundle) -> str:
    """Return a line with the version, the digest reference and the recorded vLLM arguments of a bundle."""
    try:
        recorded = " ".join(bundle.manifest.provenance.arguments) or "no arguments"
    except BundleError as error:
        recorded = error.message
    return f"{bundle.identity[0] or '?'}:v{bundle.version}  {bundle.identity[0]}@{bundle.digest[:19]}  {recorded}"


def _is_same_model(key: Key, name: str | None, bundle: Bundle) -> bool:
    if name is not None and bundle.name == name:
        return True
    model = {field: value for field, value in key.fields.items() if field.startswith("model.")}
    return any(bundle.key.fields.get(field) == value for field, value in model.items())
