"""Push to and pull from a real registry process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts import oci_registry, remote, sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.errors import (
    DigestMismatchError,
    MissingBlobError,
)
from coldstart.artifacts.store import Store
from support.registry import host
from tools.bundles import flip, keep, key, provenance, publish, write_tree

from coldstart.validate.checks import check

__all__ = ["host"]


def test_a_bundle_and_its_signature_survive_the_round_trip(host: str, store: Store, tmp_path: Path) -> None:
    with store.open_draft(key()) as draft:
        draft.add_tree("compile", write_tree(tmp_path / "code", {"k.so": b"x" * 9000}))
        bundle = draft.publish(provenance(), signer=sign.load_host_key(tmp_path / "state"))
    address = remote.push(bundle, f"oci://{host}/models/tiny:v1")
    assert address == f"oci://{host}/models/tiny@{bundle.digest}"
    for number, source in enumerate((address, f"oci://{host}/models/tiny:v1")):
        pulled = remote.pull(Store(tmp_path / f"pulled-{number}"), source)
        assert pulled == bundle and check(pulled) == []
        trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
        assert pulled.extract_section("compile", tmp_path / f"out-{number}", trust=trust) == 1


def test_pushing_again_uploads_nothing_and_keeps_both_signatures(
    host: str, store: Store, tmp_path: Path
) -> None:
    bundle = publish(store, tmp_path)
    address = f"oci://{host}/again/tiny:v1"
    assert remote.push(bundle, address) == remote.push(bundle, address)
    for state in ("one", "two"):
        with store.open_draft(bundle.key) as draft:
            for name in ("kv", "compile"):
                keep(draft, bundle, name)
            signed = draft.publish(provenance(), signer=sign.load_host_key(tmp_path / state))
    assert signed == bundle
    remote.push(bundle, address)
    pulled = remote.pull(Store(tmp_path / "pulled"), address)
    for state in ("one", "two"):
        assert sign.TrustStore(sign.trust_dir(tmp_path / state))(pulled).ok


def test_a_damaged_blob_is_not_pushed(host: str, store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path, run="damaged")
    flip(blob_path(store.root, bundle.find_readable_section("kv").digest), 3)
    with pytest.raises(DigestMismatchError):
        remote.push(bundle, f"oci://{host}/damaged/tiny:v1")
    with pytest.raises(MissingBlobError):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/damaged/tiny:v1")


def test_a_foreign_image_is_refused(host: str, store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    remote.push(bundle, f"oci://{host}/foreign/tiny:v1")
    place = oci_registry.parse_repository(f"{host}/foreign/tiny:other")
    document = json.loads(bundle.read_image_manifest())
    document["artifactType"] = "application/vnd.example"
    place._upload_manifest("other", json.dumps(document).encode())
    with pytest.raises(Exception, match="not that of a coldstart bundle"):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/foreign/tiny:other")
