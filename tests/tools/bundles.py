"""Small bundles for tests, valid and forged."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import zstandard
from coldstart.artifacts import oci
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.artifacts.manifest import SECTION_TYPES, Manifest, Provenance
from coldstart.artifacts.store import Store
from coldstart.artifacts.writer import BundleDraft, Signer

NAME = "org/tiny"
KV = {"blocks": 7, "bytes_per_block": 4096.5}
TREE = {"tokenizer.json": b'{"a":1}', "sub/merges.txt": b"a b\n"}
CODE = {"kernel.so": b"\x7fELF" + bytes(64), "cache/graph.py": b"def f(): ...\n"}


def key(**engine: str | int | float | bool | None) -> Key:
    """Return a key of one model; `engine` fields vary it."""
    fields = {"hardware.name": "cpu", "model.name": "tiny", "runtime.vllm": "0.32"}
    return Key(fields | {f"engine.{name}": value for name, value in engine.items()})


def provenance(name: str = NAME) -> Provenance:
    """Return a fixed provenance."""
    return Provenance(
        "2026-01-02T03:04:05Z", {"coldstart": "0.1.0"}, ("materialize", name), {"load": 1.5}, name
    )


def write_tree(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write `files` below `directory`."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def keep(draft: BundleDraft, bundle: Bundle, name: str) -> None:
    """Take over a section of another bundle unchanged."""
    draft.staging.copy_blob(bundle.open_section(name))
    draft.sections[name] = bundle.find_readable_section(name)


def publish(
    store: Store,
    scratch: Path,
    wanted: Key | None = None,
    *,
    signer: Signer | None = None,
    created: str | None = None,
    **kv: object,
) -> Bundle:
    """Publish a bundle with a JSON section and a tree."""
    with store.open_draft(wanted or key()) as draft:
        draft.add_json("kv", KV | kv)
        if not (scratch / "compile").exists():
            write_tree(scratch / "compile", CODE)
        draft.add_tree("compile", scratch / "compile")
        made = provenance() if created is None else replace(provenance(), created=created)
        return draft.publish(made, signer=signer)


def publish_sections(
    store: Store, wanted: Key | None = None, *, signer: Signer | None = None, **sections: object
) -> Bundle:
    """Publish a bundle of these sections: a path is a tree, and every other value a document."""
    with store.open_draft(wanted or key()) as draft:
        for name, value in sections.items():
            if isinstance(value, Path):
                draft.add_tree(name, value)
            else:
                draft.add_json(name, value)
        return draft.publish(provenance(), signer=signer)


def forge(store: Store, blob: bytes, section: str = "compile", media_type: str | None = None) -> Bundle:
    """Create a bundle whose only section is `blob`, with correct digests."""
    with store.open_draft(key()) as draft:
        with draft.staging.open_blob() as file:
            file.write(blob)
        kind = media_type or SECTION_TYPES[section].media_type
        entry = oci.Descriptor(kind, file.digest, file.size)
        draft.sections[section] = entry
        return draft.publish(provenance())


def plant(store: Store, config: bytes, change: Callable[[bytes], bytes] = bytes) -> Bundle:
    """Create a bundle with `config` as its config blob and no layers; `change` edits the bytes of the image manifest."""
    with store.open_draft(key()) as draft:
        described = draft.staging.add_blob(config, oci.CONFIG_TYPE)
        image = change(oci.ImageManifest(oci.BUNDLE_TYPE, described, ()).serialize())
        descriptor = draft.staging.add_blob(image, oci.MANIFEST_TYPE)
        return draft.staging.publish(descriptor, Manifest(key(), (), provenance()), ())


def config(**changes: object) -> dict[str, object]:
    """Return the config document of an empty bundle with replaced members."""
    document: dict[str, object] = json.loads(Manifest(key(), (), provenance()).serialize_config())
    return document | changes


def tar_zst(*members: tuple[tarfile.TarInfo, bytes], tail: bytes = b"") -> bytes:
    """Return a tar.zst of arbitrary members."""
    return zstandard.compress(plain_tar(*members) + tail)


def plain_tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an uncompressed tar of arbitrary members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            info.size = len(data) or info.size
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, **changes: object) -> tarfile.TarInfo:
    """Return a tar header with replaced attributes."""
    info = tarfile.TarInfo(name)
    for attribute, value in changes.items():
        setattr(info, attribute, value)
    return info


def damage(bundle: Bundle, section: str) -> None:
    """Flip one bit of the blob of a section."""
    flip(blob_path(bundle.layout.root, bundle.find_readable_section(section).digest), -1)


def flip(path: Path, position: int) -> None:
    """Flip one bit of the byte at `position`."""
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0x10
    path.write_bytes(bytes(data))
