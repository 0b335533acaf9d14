"""What can be said about a bundle or a key without running anything: needs neither torch nor vllm.

A word the user types is a bundle in the store, or else a model whose key is composed for this machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle, Trust, TrustResult
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Key, Mismatch, diff
from coldstart.artifacts.section import SECTION_TYPES
from coldstart.artifacts.store import NotFound, Store
from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailed, NoBundle
from coldstart.key import keys
from coldstart.machine import paths, secrets
from coldstart.machine.paths import Cache
from coldstart.model import models
from coldstart.model.aliases import NAMES
from coldstart.model.models import ResolvedModel

# In `stages`: what a materialization could not make.
NOT_MADE = "not_made"


@dataclass(frozen=True)
class Lookup:
    """A model with vLLM's arguments, their key, and what the store has for it: the bundle, or the nearest and where it differs.

    Every command begins with one, and hands it down: nothing below asks again for the model, the arguments or the cache.
    ``offline`` says that the network is not to be asked for what is still missing. Only what ``accepts`` accepts is found
    (None: `trust`; `bundle.anyone` for whoever made it); ``untrusted`` is a bundle of this key that was passed over for it,
    and ``notes`` say what is worth knowing of the choice.
    """

    model: ResolvedModel
    vllm_args: Arguments
    cache: Cache
    key: Key
    bundle: Bundle | None = None
    nearest: Bundle | None = None
    mismatches: tuple[Mismatch, ...] = ()
    offline: bool = False
    accepts: Trust | None = None
    untrusted: Bundle | None = None
    notes: tuple[str, ...] = ()

    @property
    def store(self) -> Store:
        """The store that was looked into."""
        return Store(self.cache.bundles)

    def again(self) -> Lookup:
        """The same key looked up once more: another process may have made the bundle meanwhile."""
        try:
            bundle = self.store.find(self.key, name=self.model.name, trust=self.accepts or trust)
        except NotFound as error:
            nearest, mismatches = error.nearest or (None, [])
            notes = tuple(_unvouched(nearest)) if nearest else ()
            return replace(
                self,
                bundle=None,
                nearest=nearest,
                mismatches=tuple(mismatches),
                untrusted=error.untrusted,
                notes=notes,
            )
        notes = (*_unvouched(bundle), *_passed_over(self.store, bundle))
        return replace(self, bundle=bundle, nearest=None, mismatches=(), untrusted=None, notes=notes)

    def without_weights(self) -> Lookup:
        """For a model directory that holds no weights: the bundle that differs in their layout alone."""
        if self.bundle is not None or self.nearest is None or self._differing != {"model.weights"}:
            return self
        if any(one.wanted is not None for one in self.mismatches):
            return self
        return replace(self, bundle=self.nearest, key=self.nearest.key, nearest=None, mismatches=())

    @property
    def weights_donor(self) -> Bundle | None:
        """Whose plan of the weights is this model's: its bundle, else one of the same model for other arguments."""
        if self.bundle is not None:
            return self.bundle
        other = {name for name in self._differing if name.startswith("model.")}
        absent = all(one.wanted is None for one in self.mismatches if one.field == "model.weights")
        return self.nearest if other <= {"model.weights"} and absent else None

    @property
    def _differing(self) -> set[str]:
        return {one.field for one in self.mismatches}


def find_bundle(store: Store, ref: str) -> Bundle | None:
    """The bundle called ``ref``, a trusted version before others, None if there is none.

    Raises Ambiguous and InvalidReference.
    """
    try:
        return store.get(ref, trust=trust)
    except NotFound:
        return None


def names_model(word: str) -> bool:
    """Whether ``word`` is a model known without asking the hub: built in, an alias, or a directory."""
    return word.lower() in NAMES or paths.expand(word).is_dir()


def look_up(
    word: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache | None = None,
    offline: bool = False,
    revision: str | None = None,
    accepts: Trust | None = None,
) -> Lookup:
    """Compose the key of the model ``word`` here and look it up, among what ``accepts`` accepts.

    Raises what models.resolve raises.
    """
    cache, given = cache or Cache.at(), Arguments(vllm_args)
    model = models.resolve(word, revision=revision, offline=offline, cache=cache)
    return Lookup(model, given, cache, keys.compose(model, given), offline=offline, accepts=accepts).again()


def _unvouched(chosen: Bundle) -> Iterator[str]:
    judged = trust(chosen)
    if not judged.ok:
        yield (
            f"{chosen.ref} is not trusted: {judged.reason}. Its code is left alone; its sizes and its list of the weights are "
            "its maker's word"
        )


def _passed_over(store: Store, chosen: Bundle) -> Iterator[str]:
    """Versions of the same key that arrived later than the chosen one, and why each was not taken."""
    for other in store.list():
        if other.version <= chosen.version or other.descriptor.annotations.get(oci.KEY) != chosen.key_digest:
            continue
        try:
            judged = trust(other)
            older = other.manifest.provenance.created < chosen.manifest.provenance.created
            why = judged.reason if not judged.ok else "it was made earlier" if older else ""
        except BundleError as error:
            why = error.message
        if why:
            yield f"{other.name}:v{other.version} was passed over for v{chosen.version}: {why}"


def miss(lookup: Lookup) -> NoBundle:
    """The error for a lookup without a bundle: field, wanted, found, and the command that makes one."""
    if lookup.untrusted is not None:
        return NoBundle(
            f"The only bundle for {lookup.model.name} with key {lookup.key.short}, {lookup.untrusted.ref}, is not trusted: "
            f"{trust(lookup.untrusted).reason}",
            mend="coldstart trust add FILE, with its maker's public key; or take it as it is: --untrusted; or "
            + shlex.join(["coldstart", "materialize", lookup.model.argument, *_after(lookup.vllm_args)]),
        )
    if lookup.nearest is None:
        detail = "and none for this model under another key"
    else:
        lines = [f"\n  {m.field}: wanted {m.wanted}, found {m.found}" for m in lookup.mismatches]
        detail = f"the nearest, {lookup.nearest.name}:v{lookup.nearest.version}, differs in" + "".join(lines)
    return NoBundle(
        f"No bundle for {lookup.model.name} with key {lookup.key.short} in the store; {detail}",
        mend=shlex.join(["coldstart", "materialize", lookup.model.argument, *_after(lookup.vllm_args)]),
    )


def require(lookup: Lookup, *, bundle: bool, signed_by: Trust | None = None) -> str:
    """Return why there is no bundle, "" where there is one.

    Raises NoBundle where there is none and `bundle` asks for one, CommandFailed where `signed_by` does not accept it.
    """
    if lookup.bundle is None:
        missing = miss(lookup)
        if bundle:
            raise missing
        return missing.message
    if signed_by is not None and not (judged := signed_by(lookup.bundle)).ok:
        raise CommandFailed(
            f"{lookup.bundle.ref} is not signed by anyone trusted here: {judged.reason}.",
            mend="coldstart trust add FILE, with the signer's public key",
        )
    return ""


def _after(vllm_args: Sequence[str]) -> list[str]:
    return ["--", *secrets.arguments(vllm_args)] if vllm_args else []


def trust(bundle: Bundle) -> TrustResult:
    """Whether a key that this user trusts signed ``bundle``."""
    from coldstart.machine import verdicts

    return verdicts.judge(bundle)


def describe(bundle: Bundle) -> dict[str, object]:
    """Everything the manifest says, as plain data."""
    manifest, judged = bundle.manifest, trust(bundle)
    return {
        "name": bundle.name,
        "version": bundle.version,
        "digest": bundle.digest,
        "size": bundle.size,
        "format_version": manifest.format_version,
        "key": {"digest": manifest.key.digest, "fields": dict(manifest.key.fields)},
        "sections": [section.document() for section in manifest.sections],
        "provenance": manifest.provenance.document(),
        "trust": {"ok": judged.ok, "signer": judged.signer, "reason": judged.reason},
    }


def not_made(bundle: Bundle) -> dict[str, str]:
    """Sections that its materialization could not make, with the reasons."""
    try:
        stages = bundle.json("stages") if bundle.has("stages") else {}
    except BundleError:
        return {}
    reasons = stages.get(NOT_MADE) if isinstance(stages, dict) else None
    return {str(k): str(v) for k, v in reasons.items()} if isinstance(reasons, dict) else {}


def unprofiled(bundle: Bundle) -> dict[str, list[int]]:
    """Sizes that the iteration profile left out for want of time, by curve."""
    try:
        profile = bundle.json("iterations") if bundle.has("iterations") else {}
    except BundleError:
        return {}
    left = profile.get("left_out") if isinstance(profile, dict) else None
    curves = left.items() if isinstance(left, dict) else ()
    return {str(curve): list(sizes) for curve, sizes in curves if isinstance(sizes, list) and sizes}


def tree(bundle: Bundle) -> dict[str, list[tuple[str, int]]]:
    """(name, bytes) of the members of each section that is a tree; every blob read is verified."""
    return {
        entry.type: _members(bundle, entry.type)
        for entry in bundle.manifest.sections
        if bundle.has(entry.type) and SECTION_TYPES[entry.type].encoding == "tar.zst"
    }


def compare(left: Bundle, right: Bundle) -> tuple[list[Mismatch], list[Mismatch]]:
    """Where two bundles differ: fields of the key, and digests of sections."""
    return diff(left.key, right.key), _section_differences(left, right)


def _section_differences(left: Bundle, right: Bundle) -> list[Mismatch]:
    mine = {entry.type: entry.digest for entry in left.manifest.sections}
    theirs = {entry.type: entry.digest for entry in right.manifest.sections}
    pairs = [Mismatch(name, mine.get(name), theirs.get(name)) for name in sorted({*mine, *theirs})]
    return [pair for pair in pairs if pair.wanted != pair.found]


def _members(bundle: Bundle, name: str) -> list[tuple[str, int]]:
    from coldstart.artifacts import tar, unpack

    entry = bundle.entry(name)
    with bundle.open_blob(name) as reader:
        stream = unpack.Budgeted(reader, unpack.budget(entry))
        listed = [(member.name, member.size) for member, _ in tar.members(stream) if not member.is_directory]
        reader.drain()
    return listed
