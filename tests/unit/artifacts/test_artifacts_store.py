"""Find, get, list, versions and nearest misses."""

import base64
import json
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from coldstart.artifacts import errors, manifest, oci, sign, store
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import (
    AmbiguousReferenceError,
    BundleError,
    DestinationExistsError,
    SectionMissingError,
    SectionTableError,
    SectionUnsupportedError,
    UnsafeLinkError,
)
from coldstart.artifacts.key import FieldMismatch
from coldstart.artifacts.manifest import SECTION_TYPES
from coldstart.artifacts.oci_layout import list_signatures, read_small_blob
from coldstart.artifacts.store import BundleNotFoundError, Store
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import structs
from tools.bundles import KV, NAME, config, key, provenance, publish


def test_a_digest_prefix_of_several_bundles_is_ambiguous(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, tmp_path, run=1), publish(store, tmp_path, run=2)
    common = f"sha256:{'ab' * 6}"
    entries = [
        structs.replace(entry, digest=f"{common}{n:052}")
        for n, entry in enumerate(store.layout.read_entries())
    ]
    monkeypatch.setattr(type(store.layout), "read_entries", lambda _: entries)
    for ref in (common, f"{NAME}@{common}"):
        with pytest.raises(AmbiguousReferenceError):
            store.find_by_reference(ref)


def test_a_miss_names_the_nearest_bundle_and_the_fields(store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path, key(dtype="float16", tp=2))
    close = publish(store, tmp_path, key(dtype="float16", tp=1))
    with pytest.raises(BundleNotFoundError) as caught:
        store.find_by_key(key(dtype="bfloat16", tp=1))
    assert caught.value.nearest == (close, [FieldMismatch("engine.dtype", "bfloat16", "float16")])
    assert close.version == 2


def test_draft_refuses_invalid_sections(store: Store, tmp_path: Path) -> None:
    with store.open_draft(key()) as draft:
        draft.add_json("kv", KV)
        with pytest.raises(SectionTableError):
            draft.add_json("kv", KV)
        with pytest.raises(SectionUnsupportedError):
            draft.add_json("compile", KV)
        with pytest.raises(SectionUnsupportedError):
            draft.add_tree("nonsense", tmp_path)
        bundle = draft.publish(provenance())
    with pytest.raises(SectionMissingError):
        bundle.read_json("stages")
    with pytest.raises(SectionUnsupportedError):
        bundle.extract_section("kv", tmp_path / "x", trust=accept_any)
    assert bundle.has_section("kv") and not bundle.has_section("stages")


def test_extraction_never_overwrites(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(DestinationExistsError):
        bundle.extract_section("compile", tmp_path / "out", trust=accept_any)


def test_a_tree_with_a_link_is_not_packed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("content")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "vocab.txt").symlink_to(tmp_path / "blob")
    with store.open_draft(key()) as draft, pytest.raises(UnsafeLinkError):
        draft.add_tree("compile", tmp_path / "tree")


_RESOURCES = files("coldstart.artifacts")
_SCHEMA = json.loads((_RESOURCES / "bundle.schema.json").read_text())
_FORMAT = (_RESOURCES / "FORMAT.md").read_text()


def _parse(document: object) -> manifest.Manifest:
    data = json.dumps(document).encode()
    config = oci.describe_blob(data, oci.CONFIG_TYPE)
    return manifest.parse_manifest(data, oci.ImageManifest(oci.BUNDLE_TYPE, config, ()))


def _provenance(**changes: object) -> dict[str, object]:
    return {"provenance": provenance().to_document() | changes}


BROKEN = {
    "version": config(format_version="3.0"),
    "no key": config(key={}),
    "key name": config(key={"nodots": 1}),
    "key path": config(key={"a.b": "/x"}),
    "key drive": config(key={"a.b": "C:\\x"}),
    "key array": config(key={"a.b": []}),
    "created": config(**_provenance(created="yesterday")),
    "local time": config(**_provenance(created="2026-01-01T00:00:00+02:00")),
    "arguments": config(**_provenance(arguments="x")),
    "seconds": config(**_provenance(seconds={"a": "1"})),
    "tool": config(**_provenance(tool={"a": 1})),
    "name": config(**_provenance(model_name="../x")),
}


def test_schema_accepts_written_documents() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    jsonschema.validate(config(), _SCHEMA)
    assert _parse(config()) == manifest.Manifest(key(), (), provenance())


@pytest.mark.parametrize("name", BROKEN)
def test_schema_and_parser_refuse_the_same_documents(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(BROKEN[name], _SCHEMA)
    with pytest.raises(BundleError):
        _parse(BROKEN[name])


def test_format_lists_every_code_once() -> None:
    classes = [*vars(errors).values(), *vars(store).values()]
    made = {c for c in classes if isinstance(c, type) and issubclass(c, BundleError) and c is not BundleError}
    codes = [c.code for c in made]
    assert len(set(codes)) == len(codes)
    listed = re.findall(r"^\| `(CS-[A-Z-]+)` \|", _FORMAT, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(codes) <= set(listed)
    assert all(c.default_hint for c in made)


def test_format_lists_every_section_type_with_its_executability() -> None:
    for line in re.findall(r"^\| `kv`.*|^\| `tokenizer`.*|^\| `compile`.*", _FORMAT, re.MULTILINE):
        names, version, encoding, executable = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            kind = SECTION_TYPES[name]
            assert (kind.version, kind.encoding) == (int(version), encoding.lower())
            assert kind.executable is ("yes" in executable)
    assert all(f"`{name}`" in _FORMAT for name in SECTION_TYPES)


def test_a_newer_minor_is_read_and_its_members_ignored() -> None:
    assert _parse(config(format_version="1.7", novelty=[1])).key == key()


@pytest.fixture
def bundle(store: Store, tmp_path: Path) -> Bundle:
    return publish(store, tmp_path, signer=sign.load_host_key(tmp_path / "state"))


def _attestation(bundle: Bundle) -> tuple[oci.ImageManifest, bytes]:
    source = bundle.layout
    found = list_signatures(source, bundle.layout.read_entries(), bundle.descriptor)
    (image,) = [image for _, image in found if image.artifact_type == oci.SIGNATURE_TYPE]
    return image, read_small_blob(source, image.layers[0], 1 << 14)


def test_securesystemslib_verifies_the_attestation(bundle: Bundle, tmp_path: Path) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signer = pytest.importorskip("securesystemslib.signer")
    public = sign.load_host_key(tmp_path / "state").private_key.public_key()
    raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()
    key = signer.SSlibKey("k", "ed25519", "ed25519", {"public": raw})
    envelope = json.loads(_attestation(bundle)[1])["dsseEnvelope"]
    envelope["signatures"] = [{"keyid": "k", **one} for one in envelope["signatures"]]
    read = dsse.Envelope.from_dict(envelope)
    assert read.verify([key], 1)
    assert read.pae() == sign.encode_pae(base64.b64decode(envelope["payload"]))
    said = json.loads(read.payload)
    assert said["subject"][0]["digest"]["sha256"] == bundle.digest.removeprefix("sha256:")
    read.payload = read.payload.replace(b"sha256", b"sha512")
    with pytest.raises(Exception, match="signatures"):
        read.verify([key], 1)


def test_an_envelope_that_securesystemslib_signed_is_trusted_here(store: Store, tmp_path: Path) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signers = pytest.importorskip("securesystemslib.signer")
    other = signers.CryptoSigner.generate_ed25519()
    pem = other._private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    sign.add_trusted_key(tmp_path / "trust", pem, name="theirs")

    class Theirs:
        def sign(self, digest: str) -> bytes:
            envelope = dsse.Envelope(sign.build_statement(digest), sign.PAYLOAD_TYPE, {})
            envelope.sign(other)
            material = {"publicKey": {"hint": "of theirs"}}
            made = {"mediaType": sign.MEDIA_TYPE, "verificationMaterial": material}
            return json.dumps(made | {"dsseEnvelope": envelope.to_dict()}).encode()

    made = publish(store, tmp_path, signer=Theirs())
    verdict = sign.TrustStore(tmp_path / "trust")(made)
    assert verdict.is_trusted
    assert not sign.TrustStore(tmp_path / "empty")(made).is_trusted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("payload", "is invalid"),  # claims this bundle, with the signature of another one
        ("sig", "is invalid"),
        ("type", "not a sigstore bundle"),
        ("digest", "covers another bundle"),
        ("garbage", "is malformed"),
    ],
)
def test_changed_attestation_does_not_verify(change: str, reason: str, tmp_path: Path) -> None:
    key = sign.load_host_key(tmp_path / "state")
    digest = f"sha256:{'a' * 64}"
    document = json.loads(key.sign(digest))
    envelope = document["dsseEnvelope"]
    if change == "payload":
        claim = sign.build_statement(f"sha256:{'b' * 64}", key.fingerprint)
        envelope["payload"] = base64.b64encode(claim).decode()
    elif change == "sig":
        envelope["signatures"] = [{"sig": base64.b64encode(bytes(64)).decode()}]
    elif change == "type":
        envelope["payloadType"] = "text/plain"
    elif change == "garbage":
        envelope["signatures"] = [{"sig": "!"}] * 3
    keys = {key.fingerprint: key.private_key.public_key()}
    asked = f"sha256:{'b' * 64}" if change in ("payload", "digest") else digest
    verdict = sign.verify_signature(json.dumps(document).encode(), asked, keys)
    assert not verdict.is_trusted and reason in verdict.reason
    assert sign.verify_signature(key.sign(digest), digest, keys).is_trusted
