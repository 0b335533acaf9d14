"""Push to and pull from a real registry process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from coldstart.artifacts import oci_registry, remote, sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.errors import (
    DigestMismatchError,
    InvalidManifestError,
    InvalidReferenceError,
    MissingBlobError,
    RemoteFailedError,
)
from coldstart.artifacts.limits import CHUNK
from coldstart.artifacts.store import Store
from support.registry import host
from tools import debian
from tools.bundles import flip, key, provenance, publish, write_tree

__all__ = ["host"]


def test_a_bundle_and_its_signature_survive_the_round_trip(host: str, store: Store, tmp_path: Path) -> None:
    with store.begin(key()) as draft:
        draft.add_tree("compile", write_tree(tmp_path / "code", {"k.so": b"x" * 9000}))
        bundle = draft.publish(provenance(), signer=sign.host_key(tmp_path / "state"))
    address = remote.push(bundle, f"oci://{host}/models/tiny:v1")
    assert address == f"oci://{host}/models/tiny@{bundle.digest}"
    for number, source in enumerate((address, f"oci://{host}/models/tiny:v1")):
        pulled = remote.pull(Store(tmp_path / f"pulled-{number}"), source)
        assert pulled == bundle and pulled.verify("checksum") == []
        trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
        assert pulled.extract("compile", tmp_path / f"out-{number}", trust=trust) == 1


def test_pushing_again_uploads_nothing_and_keeps_both_signatures(
    host: str, store: Store, tmp_path: Path
) -> None:
    bundle = publish(store, tmp_path)
    address = f"oci://{host}/again/tiny:v1"
    assert remote.push(bundle, address) == remote.push(bundle, address)
    for state in ("one", "two"):
        with store.begin(bundle.key) as draft:
            for name in ("kv", "compile"):
                draft.keep(bundle, name)
            signed = draft.publish(provenance(), signer=sign.host_key(tmp_path / state))
    assert signed == bundle
    remote.push(bundle, address)
    pulled = remote.pull(Store(tmp_path / "pulled"), address)
    for state in ("one", "two"):
        assert sign.trusted(pulled, sign.trust_dir(tmp_path / state)).ok


def test_one_bad_chunk_of_a_large_section_is_fetched_alone(host: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree" / "pages.img").open("wb") as file:
        for number in range(5):
            file.write(bytes([number]) * 1024 + number.to_bytes(4, "big") * (2 << 20))
    noise = (tmp_path / "tree" / "noise").open("wb")
    import random

    noise.write(random.Random(3).randbytes(2 * CHUNK + 999))
    noise.close()
    with store.begin(key()) as draft:
        draft.add_tree("snapshot", tmp_path / "tree", level=1, threads=2)
        bundle = draft.publish(provenance())
    entry = bundle.entry("snapshot")
    assert len(entry.chunks) == 3
    address = remote.push(bundle, f"oci://{host}/large/tiny:v1", memory=True)
    path = blob_path(store.root, entry.digest)
    stored = path.read_bytes()
    flip(path, CHUNK + 77)
    assert [f.code for f in bundle.verify()] == ["CS-DIGEST"]
    assert bundle.read_range("snapshot", CHUNK - 1000, 1000) == stored[CHUNK - 1000 : CHUNK]
    outcome = store.repair(bundle, [remote.source(address)])
    assert [(r.subject, r.repaired, r.fetched) for r in outcome] == [("snapshot", True, CHUNK)]
    assert path.read_bytes() == stored


def test_a_damaged_blob_is_not_pushed(host: str, store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path, run="damaged")
    flip(blob_path(store.root, bundle.entry("kv").digest), 3)
    with pytest.raises(DigestMismatchError):
        remote.push(bundle, f"oci://{host}/damaged/tiny:v1")
    with pytest.raises(MissingBlobError):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/damaged/tiny:v1")


def test_pull_reports_missing_tag_and_registry(host: str, store: Store) -> None:
    with pytest.raises(MissingBlobError):
        remote.pull(store, f"oci://{host}/no/such:tag")
    with pytest.raises(RemoteFailedError):
        remote.pull(store, "oci://127.0.0.1:1/no/such")
    assert not store.list()


def test_a_foreign_image_is_refused(host: str, store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    remote.push(bundle, f"oci://{host}/foreign/tiny:v1")
    place = oci_registry.repository(f"{host}/foreign/tiny:other")
    document = json.loads(bundle.image_bytes())
    document["artifactType"] = "application/vnd.example"
    place._put("other", json.dumps(document).encode())
    with pytest.raises(Exception, match="not a coldstart bundle"):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/foreign/tiny:other")


@pytest.mark.parametrize(
    "address", ["oci://", "oci://host", "oci://host/UPPER", "oci://host/a:b c", "oci://h/../x"]
)
def test_malformed_reference(address: str, store: Store) -> None:
    with pytest.raises(InvalidReferenceError):
        remote.pull(store, address)


def _skopeo(*words: str) -> subprocess.CompletedProcess[str]:
    """Run skopeo, the command of the image library of podman and CRI-O. Raises Unavailable."""
    home = debian.unpacked("skopeo", "libgpgme11", "libassuan0")
    libraries = ":".join(str(place.parent) for place in home.rglob("libgpgme.so.11"))
    command = [str(home / "usr/bin/skopeo"), "--insecure-policy", *words]
    environment = os.environ | {"LD_LIBRARY_PATH": libraries}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="umoci unpacks as root")
def test_umoci_unpacks_the_image_to_a_store(host: str, store: Store, tmp_path: Path) -> None:
    with store.begin(key()) as draft:
        draft.add_tree("compile", write_tree(tmp_path / "code", {"k.so": b"x" * 9000}))
        bundle = draft.publish(provenance(), signer=sign.host_key(tmp_path / "state"))
    address = remote.push_image(bundle, f"oci://{host}/images/tiny:v1")
    assert remote.push_image(bundle, f"oci://{host}/images/tiny:v1") == address
    with pytest.raises(InvalidManifestError, match="of a container image"):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/images/tiny:v1")
    try:
        layout = tmp_path / "layout"
        copied = _skopeo("copy", "--src-tls-verify=false", f"docker://{address}", f"oci:{layout}:v1")
        umoci = debian.unpacked("umoci") / "usr/bin/umoci"
    except debian.Unavailable as reason:
        pytest.skip(str(reason))
    assert copied.returncode == 0, copied.stderr
    seen = _skopeo("inspect", f"oci:{layout}:v1").stdout
    assert json.loads(seen)["Os"] == "linux"
    unpacked = [str(umoci), "unpack", "--image", f"{layout}:v1", str(tmp_path / "image")]
    subprocess.run(unpacked, check=True, capture_output=True)
    (found,) = Store(tmp_path / "image" / "rootfs").list()
    assert found == bundle and found.verify("checksum") == []
    assert sign.trusted(found, sign.trust_dir(tmp_path / "state")).ok


def test_an_image_goes_to_a_registry_alone(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InvalidReferenceError, match="not a registry"):
        remote.push_image(publish(store, tmp_path), str(tmp_path / "there"))
