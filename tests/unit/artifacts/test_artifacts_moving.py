"""Archives, directories and the hub; prune; ranged reads."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

import pytest
from coldstart.artifacts import oci, remote, sign
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import (
    DigestMismatchError,
    InvalidReferenceError,
    MissingBlobError,
)
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.store import Store
from tools.bundles import key, provenance, publish, write_tree

from coldstart.validate.checks import check


def _signed(store: Store, scratch: Path) -> Bundle:
    with store.open_draft(key()) as draft:
        draft.add_json("kv", {"blocks": 3})
        draft.add_tree("compile", write_tree(scratch / "code", {"k.so": b"x" * 100, "empty": b""}))
        return draft.publish(provenance(), signer=sign.load_host_key(scratch / "state"))


def _same(found: Bundle, bundle: Bundle, scratch: Path) -> None:
    assert found == bundle and check(found) == [] and found.manifest == bundle.manifest
    assert sign.TrustStore(sign.trust_dir(scratch / "state"))(found).ok


def test_export_and_import_keep_digest_and_signature(store: Store, tmp_path: Path) -> None:
    bundle = _signed(store, tmp_path)
    size = export_archive([bundle], tmp_path / "one.tar")
    assert size == (tmp_path / "one.tar").stat().st_size
    other = Store(tmp_path / "other")
    (found,) = import_archive(other, tmp_path / "one.tar")
    _same(found, bundle, tmp_path)
    export_archive([found], tmp_path / "two.tar")
    assert (tmp_path / "two.tar").read_bytes() == (tmp_path / "one.tar").read_bytes()
    assert import_archive(other, tmp_path / "one.tar") == [found] and len(other.list_bundles()) == 1


def test_extracted_archive_is_a_readable_store(store: Store, tmp_path: Path) -> None:
    """Extract the archive as in an image and make it read-only like the mounted volume."""
    bundle = publish(store, tmp_path / "scratch")
    archive, root = tmp_path / "bundles.tar", tmp_path / "mounted"
    export_archive([bundle], archive)
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    for place in (root, *root.rglob("*")):
        place.chmod(0o555 if place.is_dir() else 0o444)
    assert [found.digest for found in Store(root).list_bundles()] == [bundle.digest]
    assert check(Store(root).list_bundles()[0]) == []


def test_a_damaged_bundle_is_not_exported(store: Store, tmp_path: Path) -> None:
    bundle = _signed(store, tmp_path)
    blob_path(store.root, bundle.find_readable_section("kv").digest).write_bytes(b"{}")
    with pytest.raises(DigestMismatchError):
        export_archive([bundle], tmp_path / "one.tar")
    assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".*"))


class Folder:
    """The hub's interface over a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> None:
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(
        self, *, repo_id: str, folder_path: str, path_in_repo: str, ignore_patterns: str
    ) -> None:
        ignored = shutil.ignore_patterns(ignore_patterns.removesuffix("/**"))
        shutil.copytree(folder_path, self.root / repo_id / path_in_repo, ignore=ignored)

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], local_dir: str) -> str:
        for pattern in allow_patterns:
            name = pattern.removesuffix("/*")
            if (self.root / repo_id / name).is_dir():
                shutil.copytree(self.root / repo_id / name, Path(local_dir) / name)
        return local_dir


def test_push_to_and_pull_from_the_hub(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, folder = _signed(store, tmp_path), Folder(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: folder)
    assert remote.push(bundle, "hf://me/bundles") == "hf://me/bundles:latest"
    _same(remote.pull(Store(tmp_path / "a"), "hf://me/bundles"), bundle, tmp_path)
    assert remote.push(bundle, "hf://me/bundles:other") == "hf://me/bundles:other"
    _same(remote.pull(Store(tmp_path / "b"), "hf://me/bundles:other"), bundle, tmp_path)
    with pytest.raises(MissingBlobError):
        remote.pull(store, "hf://me/bundles:absent")
    for address in ("me/bundles:..", "me/bundles:../x", "me/bundles:*", "me/bundles:a/b"):
        with pytest.raises(InvalidReferenceError):
            remote.pull(store, f"hf://{address}")


def test_a_blob_that_is_pruned_during_a_pull_is_an_error(store: Store, tmp_path: Path) -> None:
    class Pruning(OciLayout):
        def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
            other.prune(keep=None, drop=other.list_bundles())
            return super().signatures(subject)

    bundle, other = publish(store, tmp_path, run=1), Store(tmp_path / "other")
    publish(other, tmp_path, run=2)  # whose section `compile` is not fetched again
    with pytest.raises(MissingBlobError, match="pruned while"):
        other.receive_bundle(Pruning(store.root), bundle.descriptor)
    assert other.list_bundles() == []
    assert other.receive_bundle(store.layout, bundle.descriptor) == bundle and check(bundle) == []


def test_prune_keeps_the_newest_and_what_it_needs(store: Store, tmp_path: Path) -> None:
    old, new = publish(store, tmp_path, run=1), publish(store, tmp_path, run=2)
    other = publish(store, tmp_path, key(tp=2), run=3)
    planned = store.prune(keep=1, dry_run=True)
    assert len(store.list_bundles()) == 3
    done = store.prune(keep=1)
    assert done == planned and done.removed == (old.digest,)
    assert done.files == 2 and done.freed_bytes > 0  # a manifest and a section; both have one config
    assert store.list_bundles() == [new, other] and check(new) == check(other) == []
    store.prune(keep=None, drop=[other])
    assert store.list_bundles() == [new]
    assert publish(store, tmp_path, run=4).version == 3


def test_prune_touches_no_blob_while_a_manifest_cannot_be_read(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    blob_path(store.root, bundle.digest).write_bytes(b"rotten")
    before = sorted(store.layout.blobs_dir.iterdir())
    assert "cannot be read" in (store.prune().note or "")
    assert sorted(store.layout.blobs_dir.iterdir()) == before


def test_the_installed_hub_client_takes_the_calls_that_are_made(tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    api = HfApi(token=False)
    signature(api.create_repo).bind("me/x", exist_ok=True)
    signature(api.upload_folder).bind(
        repo_id="me/x", folder_path=str(tmp_path), path_in_repo="v1", ignore_patterns=".coldstart/**"
    )
    signature(api.snapshot_download).bind("me/x", allow_patterns=["v1/*"], local_dir=str(tmp_path))
