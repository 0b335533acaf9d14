"""Archives, directories, the hub and a real registry; prune; ranged reads."""

import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path

import pytest
from coldstart.artifacts import oci, oci_registry, remote, sign
from coldstart.artifacts.archive import export_archive
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import DigestMismatchError, InvalidReferenceError, MissingBlobError
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.prune import prune
from coldstart.artifacts.store import Store
from support.processes import wait_until
from tools.bundles import damage, keep, provenance, publish, publish_sections, write_tree

from coldstart.system.ipc.addresses import find_free_port
from coldstart.validate.checks import check

_PACKAGE = "docker-registry"


def _find_binary() -> Path:
    """Return the registry's executable, downloaded on first use. Skip the test where that is impossible."""
    if installed := shutil.which(_PACKAGE):
        return Path(installed)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coldstart-tests" / _PACKAGE
    if not (home / "usr").exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, ignore_cleanup_errors=True) as scratch:
            try:
                if _run_command(scratch, "apt-get", "download", _PACKAGE).returncode:
                    _run_command(scratch, "apt-get", "update").check_returncode()
                    _run_command(scratch, "apt-get", "download", _PACKAGE).check_returncode()
                (package,) = Path(scratch).glob("*.deb")
                _run_command(scratch, "dpkg", "-x", str(package), "unpacked").check_returncode()
            except (subprocess.SubprocessError, OSError) as error:
                pytest.skip(f"{_PACKAGE} cannot be downloaded: {error}")
            with suppress(OSError):  # another worker was faster
                Path(scratch, "unpacked").rename(home)
    return home / "usr" / "bin" / _PACKAGE


def _run_command(directory: str, *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=directory, capture_output=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a running registry of Debian's package docker-registry, which is unpacked and not installed."""
    scratch, port = tmp_path_factory.mktemp("registry"), find_free_port()
    config = scratch / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
        f"storage: {{filesystem: {{rootdirectory: '{scratch / 'registry'}'}}}}\n"
    )
    command = [_find_binary(), "serve", config]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_open(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _signed(store: Store, scratch: Path) -> Bundle:
    code = write_tree(scratch / "code", {"k.so": b"x" * 100, "empty": b""})
    signer = sign.load_host_key(scratch / "state")
    return publish_sections(store, signer=signer, kv={"blocks": 3}, compile=code)


def _same(found: Bundle, bundle: Bundle, scratch: Path) -> None:
    assert found == bundle and check(found) == [] and found.manifest == bundle.manifest
    assert sign.TrustStore(sign.trust_dir(scratch / "state"))(found).is_trusted


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
    damage(bundle, "kv")
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
        def read_signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
            prune(other.layout, keep=None, drop=other.list_bundles())
            return super().read_signatures(subject)

    bundle, other = publish(store, tmp_path, run=1), Store(tmp_path / "other")
    publish(other, tmp_path, run=2)  # whose section `compile` is not fetched again
    with pytest.raises(MissingBlobError, match="pruned while"):
        other.receive_bundle(Pruning(store.root), bundle.descriptor)
    assert other.list_bundles() == []
    assert other.receive_bundle(store.layout, bundle.descriptor) == bundle and check(bundle) == []


def test_prune_touches_no_blob_while_a_manifest_cannot_be_read(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    blob_path(store.root, bundle.digest).write_bytes(b"rotten")
    before = sorted(store.layout.blobs_dir.iterdir())
    assert "cannot be read" in (prune(store.layout).note or "")
    assert sorted(store.layout.blobs_dir.iterdir()) == before


def test_the_installed_hub_client_takes_the_calls_that_are_made(tmp_path: Path) -> None:
    from huggingface_hub import HfApi

    api = HfApi(token=False)
    signature(api.create_repo).bind("me/x", exist_ok=True)
    signature(api.upload_folder).bind(
        repo_id="me/x", folder_path=str(tmp_path), path_in_repo="v1", ignore_patterns=".coldstart/**"
    )
    signature(api.snapshot_download).bind("me/x", allow_patterns=["v1/*"], local_dir=str(tmp_path))


def test_a_bundle_and_its_signature_survive_the_round_trip(host: str, store: Store, tmp_path: Path) -> None:
    code = write_tree(tmp_path / "code", {"k.so": b"x" * 9000})
    bundle = publish_sections(store, signer=sign.load_host_key(tmp_path / "state"), compile=code)
    address = remote.push(bundle, f"oci://{host}/models/tiny:v1")
    assert address == f"oci://{host}/models/tiny@{bundle.digest}"
    for number, source in enumerate((address, f"oci://{host}/models/tiny:v1")):
        pulled = remote.pull(Store(tmp_path / f"pulled-{number}"), source)
        assert pulled == bundle and check(pulled) == []
        trust = sign.TrustStore(sign.trust_dir(tmp_path / "state"))
        assert pulled.extract_section("compile", tmp_path / f"out-{number}", trust=trust) == 1


def test_second_push_uploads_nothing_and_keeps_signatures(host: str, store: Store, tmp_path: Path) -> None:
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
        assert sign.TrustStore(sign.trust_dir(tmp_path / state))(pulled).is_trusted


def test_a_damaged_blob_is_not_pushed(host: str, store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path, run="damaged")
    damage(bundle, "kv")
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
    with pytest.raises(Exception, match="not a coldstart bundle"):
        remote.pull(Store(tmp_path / "pulled"), f"oci://{host}/foreign/tiny:other")
