"""Look up bundles by the key of a model on this machine, and explain why a lookup failed, without importing torch or vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle, TrustCheck
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import FieldMismatch, Key
from coldstart.artifacts.store import BundleNotFoundError, Store
from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError, NoBundleError, UsageError
from coldstart.models import keys, resolution
from coldstart.models.resolution import ResolvedModel
from coldstart.system import secrets
from coldstart.system.paths import Cache
from coldstart.system.trust import trusted_keys

trust = trusted_keys.check_trust
# Member of the section `stages`: sections that a materialization could not create, with reasons.
NOT_MADE = "not_made"
# Prefix of the reason for a missing section that another attempt may build.
PROOF_FAILED = "the verification run failed with it"
_Section = TypeVar("_Section")
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True)
class BundleLookup:
    """Model, vLLM arguments, their bundle key, and the bundle of that key or the nearest bundle with its mismatches.

    Each command creates one lookup and passes it on, so the model, the arguments and the cache are resolved once.
    ``arguments_bundle`` is the bundle that recorded ``vllm_args``, or None if the user typed them. ``offline`` forbids
    downloads. ``accepts`` decides which bundles can be used (None: `trust`; `bundle.accept_any`: any). ``untrusted`` is a
    bundle of this key that was not accepted. ``notes`` explain the choice to the user.
    """

    model: ResolvedModel
    vllm_args: Arguments
    cache: Cache
    key: Key
    bundle: Bundle | None = None
    nearest: Bundle | None = None
    mismatches: tuple[FieldMismatch, ...] = ()
    offline: bool = False
    accepts: TrustCheck | None = None
    untrusted: Bundle | None = None
    arguments_bundle: Bundle | None = None
    notes: tuple[str, ...] = ()

    @property
    def store(self) -> Store:
        """Return the bundle store of the cache."""
        return Store(self.cache.bundles)

    def format_template_command(self, level: str) -> str:
        """Return the command line that starts a template of this `level` for the lookup.

        It specifies the bundle version that recorded the arguments, because the newest bundle can have other arguments.
        """
        if self.arguments_bundle is None or self.model.cli_argument != self.arguments_bundle.name:
            # A directory has no versions.
            return self.format_command("template start", "--level", level)
        reference = f"{self.arguments_bundle.name}:v{self.arguments_bundle.version}"
        return shlex.join(["coldstart", "template", "start", reference, "--level", level])

    def format_command(self, name: str, *options: str) -> str:
        """Return the command line of the subcommand `name` for this model, with `options` and the vLLM arguments."""
        words = ["coldstart", *name.split(), self.model.cli_argument, *options]
        return shlex.join(
            [*words, "--", *secrets.redact_arguments(self.vllm_args)] if self.vllm_args else words
        )

    def refresh(self, bundles: Sequence[Bundle] | None = None) -> BundleLookup:
        """Return a new lookup of the same key in `bundles`, or in the store as it is now.

        A caller that has built the bundle or waited for the lock of its key omits `bundles`: another process may have
        published it meanwhile. The blobs of a bundle are opened and verified only when a start uses them, because they can
        change after this check.
        """
        bundles = self.store.list_bundles() if bundles is None else bundles
        try:
            bundle = self.store.find_by_key(
                self.key, name=self.model.name, trust=self.accepts or trust, bundles=bundles
            )
        except BundleNotFoundError as error:
            nearest, mismatches = error.nearest or (None, [])
            notes = tuple(describe_distrust(nearest)) if nearest else ()
            return replace(
                self,
                bundle=None,
                nearest=nearest,
                mismatches=tuple(mismatches),
                untrusted=error.untrusted,
                notes=notes,
            )
        notes = (*describe_distrust(bundle), *_explain_skipped_versions(bundles, bundle))
        return replace(self, bundle=bundle, nearest=None, mismatches=(), untrusted=None, notes=notes)

    def accept_nearest_without_weights(self) -> BundleLookup:
        """Return a lookup with the nearest bundle if the model has no weights and only the weight layout differs, else self."""
        if self.bundle is not None or self.nearest is None or self._differing != {"model.weights"}:
            return self
        if any(one.wanted is not None for one in self.mismatches):
            return self
        return replace(self, bundle=self.nearest, key=self.nearest.key, nearest=None, mismatches=())

    @property
    def weights_donor(self) -> Bundle | None:
        """Return the bundle whose weights plan fits this model (its own, or one with other arguments), or None."""
        if self.bundle is not None:
            return self.bundle
        other = {name for name in self._differing if name.startswith("model.")}
        absent = all(one.wanted is None for one in self.mismatches if one.field == "model.weights")
        return self.nearest if other <= {"model.weights"} and absent else None

    @property
    def _differing(self) -> set[str]:
        return {one.field for one in self.mismatches}


def look_up(
    word: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache | None = None,
    offline: bool = False,
    revision: str | None = None,
    accepts: TrustCheck | None = None,
    bundles: Sequence[Bundle] | None = None,
) -> BundleLookup:
    """Compose the bundle key of the model ``word`` on this machine, and look up an accepted bundle.

    With an empty sequence as ``bundles``, only compose the key, and read no store.

    Raises UsageError if ``vllm_args`` name another model, a revision or a file that cannot be read, and the same errors as
    `resolution.resolve`.
    """
    cache, arguments = cache or Cache.at(), Arguments(vllm_args)
    if given := [f"--{flag}" for flag in ("model", "revision") if arguments.contains_flag(flag)]:
        reason = f"vLLM's arguments must not contain {' and '.join(given)}, which coldstart sets"
        raise UsageError(reason, hint="specify MODEL, and --revision if it is needed, before --")
    if arguments.contains_flag("config"):
        raise UsageError(
            "cannot read the file of vLLM's --config", hint="name a YAML file: -- --config FILE.yaml"
        )
    model = resolution.resolve(word, revision=revision, offline=offline, cache=cache)
    key = keys.compose_key(model, arguments)
    return BundleLookup(model, arguments, cache, key, offline=offline, accepts=accepts).refresh(bundles)


def describe_distrust(chosen: Bundle) -> Iterator[str]:
    """Yield a note if no trusted key signed the bundle."""
    judged = trust(chosen)
    if not judged.is_trusted:
        yield (
            f"bundle {chosen.ref} is not trusted: {judged.reason}; its code is not used, and its sizes and weights plan "
            "are unverified"
        )


def _explain_skipped_versions(bundles: Iterable[Bundle], chosen: Bundle) -> Iterator[str]:
    """Yield a note for each later version of the same key, with the reason why it was not chosen."""
    for other in bundles:
        if other.version <= chosen.version or other.descriptor.annotations.get(oci.KEY) != chosen.key_digest:
            continue
        try:
            judged = trust(other)
            older = other.manifest.provenance.created < chosen.manifest.provenance.created
            why = judged.reason if not judged.is_trusted else "it was created earlier" if older else ""
        except BundleError as error:
            why = error.message
        if why:
            yield f"{other.name}:v{other.version} was skipped in favor of v{chosen.version}: {why}"


def build_miss_error(lookup: BundleLookup, use: Callable[[Arguments], str] | None = None) -> NoBundleError:
    """Build the error for a lookup without a bundle, with the nearest bundle, the differences, and commands as a hint.

    `use` formats the command that starts the model with the nearest bundle's arguments; the default is `coldstart serve`.
    """
    create = lookup.format_command("materialize")
    if lookup.untrusted is not None:
        untrusted = lookup.untrusted
        # A bundle that was found without arguments records its own. They are not shown, because they can name code to load.
        is_same = untrusted.key == lookup.key
        use_it = f"use it anyway: {lookup.format_command('serve', '--untrusted')}; or " if is_same else ""
        create = create if is_same else f"build a bundle with your own arguments after --: {create}"
        return NoBundleError(
            f"bundle {untrusted.ref}, the only one for {lookup.model.name} with key {untrusted.key.short_digest}, "
            f"is not trusted: {trust(untrusted).reason}",
            hint=f"run `coldstart trust add FILE` with the publisher's public key; or {use_it}{create}",
        )
    summary = f"no bundle for {lookup.model.name} with key {lookup.key.short_digest} in the store"
    if (nearest := lookup.nearest) is None:
        return NoBundleError(
            f"{summary}; the store has no other bundle for this model",
            hint=f"{create}; or fetch a bundle: coldstart pull ADDRESS",
        )
    if (
        differ_only_in_arguments(lookup.mismatches)
        and (recorded := read_recorded_arguments(nearest)) is not None
    ):
        serve = ["coldstart", "serve", lookup.model.cli_argument, "--", *recorded]
        create = f"{shlex.join(serve) if use is None else use(recorded)}, or {create}"
    differences = map(_difference, lookup.mismatches)
    detail = f"the nearest bundle, {nearest.name}:v{nearest.version}, differs in"
    return NoBundleError([f"{summary}; {detail}", *differences], hint=create)


def _difference(one: FieldMismatch) -> str:
    if not one.field.startswith(keys.ENGINE):
        return f"{one.field}: {one.found} in the bundle, {one.wanted} here"
    option = one.field.removeprefix(keys.ENGINE).replace("_", "-")
    found, wanted = ("not" if value is None else value for value in (one.found, one.wanted))
    return f"--{option}: {found} in the bundle, {wanted} requested"


def differ_only_in_arguments(mismatches: Iterable[FieldMismatch]) -> bool:
    """Return whether all mismatches are in vLLM's arguments."""
    return all(one.field.startswith(keys.ENGINE) for one in mismatches)


def check_bundle(lookup: BundleLookup, *, is_required: bool, signed_by: TrustCheck | None = None) -> str:
    """Return the reason why the lookup has no bundle, or "" if it has one.

    Raises:
        NoBundleError: The lookup has no bundle, and `is_required` is true.
        CommandFailedError: `signed_by` does not accept the bundle.
    """
    if lookup.bundle is None:
        missing = build_miss_error(lookup)
        if is_required:
            raise missing
        summary, *differences = missing.lines
        return f"{summary} {'; '.join(differences)}".rstrip()
    if signed_by is not None and not (judged := signed_by(lookup.bundle)).is_trusted:
        raise CommandFailedError(
            f"bundle {lookup.bundle.ref} is not signed with a trusted key: {judged.reason}",
            hint="run `coldstart trust add FILE` with the signer's public key",
        )
    return ""


def read_recorded_arguments(bundle: Bundle) -> Arguments | None:
    """Return the recorded vLLM arguments, or None if the bundle is untrusted or its arguments contain a redacted secret."""
    if not trust(bundle).is_trusted:
        return None
    recorded = Arguments(bundle.manifest.provenance.arguments)
    return None if any(secrets.HIDDEN in word for word in recorded) else recorded


class VerificationStart(msgspec.Struct, frozen=True):
    """Measurements of the test start that verified a bundle: time to ready in seconds, and memory in bytes.

    `device_bytes` is the peak over all GPUs, and `asleep_bytes` and `parked_bytes` are what the engine occupied there
    while it slept and while it was parked. With the smallest KV cache that vLLM accepts, of `kv_floor_bytes`, the peak
    would be `device_floor_bytes`, of which the weights take `weights_bytes`. They are None if they were not measured, as
    with vLLM's CPU build. `spans` are the seconds of each stage, summed over all ranks.
    """

    ready_s: Annotated[float, msgspec.Meta(ge=0)]
    memory_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 62)]
    device_bytes: _Size | None = None
    asleep_bytes: _Size | None = None
    parked_bytes: _Size | None = None
    weights_bytes: _Size | None = None
    kv_floor_bytes: _Size | None = None
    device_floor_bytes: _Size | None = None
    spans: dict[str, float] = {}


class _Stages(msgspec.Struct):
    not_made: dict[str, str] = {}


def _read_section(bundle: Bundle, section: str, kind: type[_Section]) -> _Section | None:
    """Decode a JSON section as `kind`, or return None if it is missing or invalid."""
    try:
        return msgspec.convert(bundle.read_json(section), kind)
    except (BundleError, msgspec.ValidationError):
        return None


def list_missing_sections(bundle: Bundle) -> dict[str, str]:
    """Return the sections that the materialization could not build, each with the reason."""
    return (_read_section(bundle, "stages", _Stages) or _Stages()).not_made


def read_verification_start(bundle: Bundle) -> VerificationStart | None:
    """Return the measurements of the test start, or None if the bundle does not contain them."""
    return _read_section(bundle, "stages", VerificationStart)
