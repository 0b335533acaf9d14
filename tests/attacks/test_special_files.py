"""A pipe, directory, socket, device or link to one in the place of a file: no reader waits for it or reads it to its end.

A document is refused with an error that names the file and has a hint. A record that only saves time is ignored.
"""

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import credentials, files, sign
from coldstart.artifacts.archive import import_archive, pull_directory
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.command_line import Run
from tools.tiny_models import write_empty

from coldstart.bench import compare
from coldstart.errors import ColdstartError, UsageError
from coldstart.fleet.live.state import FleetState
from coldstart.graphs import tables
from coldstart.graphs.errors import AlteredTableError
from coldstart.host.tables import read_toml
from coldstart.launch import caches
from coldstart.models import inspection
from coldstart.system import file_state, fingerprint, paths
from coldstart.system.paths import Cache
from coldstart.system.secrets import read_key
from coldstart.system.trust import trusted_keys
from coldstart.system.trust.unpacked import unpack_section
from coldstart.validate import responses
from coldstart.validate.checks import check
from coldstart.weights.prefetch.fetcher import open_source
from coldstart.weights.prefetch.sources import SourceUnusableError

_PATIENCE_S = 60.0


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # The path of a socket can have 107 bytes.
        short = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{short}/{path.name}")
        finally:
            os.close(short)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("a-pipe"))
    path.symlink_to("a-pipe")


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": _bind,
    "link to a pipe": _link_to_pipe,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nothing"),
}


@pytest.fixture(params=SPECIAL)
def replace(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Return replace(path), which puts a special file in the place of `path`."""

    def put(path: Path) -> Path:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        SPECIAL[request.param](path)
        return path

    return put


Replace = Callable[[Path], Path]


def _call(read: Callable[[], Any]) -> Any:
    """Return the result of `read` or its error. Fail if it hangs."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(read())
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    assert results, "the reader hangs"
    return results[0]


def _refuse(read: Callable[[], Any], name: str, *kinds: type[Exception]) -> None:
    """Fail unless `read` ends with an error for users that contains `name` and a hint."""
    error = _call(read)
    assert isinstance(error, kinds or (ColdstartError,)), error
    assert name in str(error)
    if isinstance(error, ColdstartError):
        assert error.hint and "internal error" not in str(error)


@pytest.mark.parametrize("name", ["index.json", "oci-layout"])
def test_document_of_a_store_is_refused(signed: Bundle, tmp_path: Path, replace: Replace, name: str) -> None:
    root = signed.layout.root
    place = replace(root / name)
    for read in (Store(root).list_bundles, lambda: pull_directory(Store(tmp_path / "other"), root)):
        found = _call(read)
        if name == "oci-layout" and not place.exists():
            assert found == [] or isinstance(found, ColdstartError)  # no store at all
        else:
            _refuse(read, "index.json" if not place.exists() else name)


@pytest.mark.parametrize("part", ["manifest", "config", "section"])
def test_blob_is_refused(signed: Bundle, tmp_path: Path, replace: Replace, part: str) -> None:
    digests_ = {
        "manifest": signed.digest,
        "config": signed.image_manifest.config.digest,
        "section": signed.find_readable_section("kv").digest,
    }
    root, digest = signed.layout.root, digests_[part]
    replace(blob_path(root, digest))
    _refuse(lambda: pull_directory(Store(tmp_path / "other"), root), digest)
    (again,) = Store(root).list_bundles()
    findings = _call(lambda: check(again))
    assert any(digest in finding.message for finding in findings), findings
    if part == "section":
        _refuse(lambda: again.read_json("kv"), digest, BundleError)


def test_commands_end_with_the_file_and_a_hint(
    run: Run, home: Path, tmp_path_factory: pytest.TempPathFactory, replace: Replace
) -> None:
    made = publish(Store(Cache.at().bundles), tmp_path_factory.mktemp("scratch"))
    source = tmp_path_factory.mktemp("source") / "bundles"
    shutil.copytree(made.layout.root, source)
    replace(source / "index.json")
    done = run("pull", str(source), code=None)
    assert done.returncode in (1, 2) and "index.json" in done.stderr and "hint" in done.stderr
    replace(made.layout.root / "index.json")
    done = run("list", code=None)
    assert done.returncode in (1, 2) and "index.json" in done.stderr and "hint" in done.stderr


def test_trusted_key_and_own_key_are_refused(signed: Bundle, replace: Replace) -> None:
    assert inspection.trust(signed).is_trusted
    (key,) = sign.trust_dir(paths.state_dir()).glob("*.pub")
    replace(key)
    _refuse(lambda: inspection.trust(signed), key.name, OSError, ColdstartError)
    store = sign.TrustStore(sign.trust_dir(paths.state_dir()))
    _refuse(lambda: store(signed), key.name, OSError, ColdstartError)
    replace(paths.state_dir() / "signing" / "host.pem")
    _refuse(lambda: sign.load_host_key(paths.state_dir()), "host.pem", OSError, ColdstartError)


def test_trusted_key_that_is_no_file_is_listed_with_the_reason(signed: Bundle, replace: Replace) -> None:
    place = replace(sign.trust_dir(paths.state_dir()) / "other.pub")
    found = _call(trusted_keys.list_keys)
    (other,) = [key for key in found if key.file == place.name]
    assert other.fingerprint is None and other.problem


def test_record_of_a_verification_is_ignored(signed: Bundle, replace: Replace) -> None:
    assert inspection.trust(signed).is_trusted
    (record,) = (paths.state_dir() / "verdicts").iterdir()
    replace(record)
    assert _call(lambda: inspection.trust(signed)).is_trusted


def test_record_of_unpacked_code_is_ignored(signed: Bundle, replace: Replace) -> None:
    root = Cache.at().unpacked
    place = unpack_section(signed, "compile", root, inspection.trust)
    record = replace(file_state.locate_record("unpacked", place))
    again = _call(lambda: unpack_section(signed, "compile", root, inspection.trust))
    # A directory cannot be replaced by a record; all other files can.
    assert isinstance(again, IsADirectoryError) if record.is_dir() else again == place


def test_fingerprint_is_invalid(tmp_path: Path, replace: Replace) -> None:
    replace(tmp_path / fingerprint.ABOUT)
    assert "no valid fingerprint" in _call(lambda: fingerprint.find_mismatch(tmp_path, "template"))


def test_lock_and_shared_object_do_not_hang(home: Path, tmp_path: Path, replace: Replace) -> None:
    replace(paths.runtime_dir() / "thawed-x" / "lock")
    assert isinstance(_call(lambda: files.remove_dead_below(paths.runtime_dir(), "thawed-")), (OSError, list))
    (tmp_path / "compiled").mkdir()
    replace(tmp_path / "compiled" / "k.so")
    assert _call(lambda: list(caches.find_truncated_libraries(tmp_path / "compiled"))) == []


def _make_model(tmp_path: Path) -> Path:
    model = write_empty(tmp_path / "model")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (model / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
def test_file_of_a_model_is_refused(home: Path, tmp_path: Path, replace: Replace, name: str) -> None:
    model = _make_model(tmp_path)
    replace(model / name)
    _refuse(lambda: inspection.look_up(str(model)), name, UsageError)


def test_shard_of_a_local_source_is_refused(tmp_path: Path, replace: Replace) -> None:
    replace(tmp_path / "model.safetensors")
    source = open_source(str(tmp_path), {})
    read = lambda: source.read("model.safetensors", 8, 0, memoryview(bytearray(8)), lambda _: None)  # noqa: E731
    _refuse(read, "model.safetensors", SourceUnusableError)
    source.close()


NAMED: dict[str, Callable[[Path], object]] = {
    "key": read_key,
    "public key": lambda path: trusted_keys.add_key(path, "other"),
    "host": lambda path: read_toml(path, "host"),
    "fleet state": FleetState,
    "prompts": responses.read_prompts,
    "baseline": compare.load_baseline,
}


@pytest.mark.parametrize("kind", NAMED)
def test_file_that_a_user_names_is_refused(home: Path, tmp_path: Path, replace: Replace, kind: str) -> None:
    place = replace(tmp_path / "given")
    if kind == "fleet state" and not place.exists():
        pytest.skip("a state that does not exist yet is an empty one")
    _refuse(lambda: NAMED[kind](place), "given", UsageError)


def test_login_file_of_docker_is_ignored(tmp_path: Path, replace: Replace) -> None:
    replace(tmp_path / "config.json")
    assert _call(lambda: credentials.find_login("h", {"DOCKER_CONFIG": str(tmp_path)})) is None


def test_archive_and_manifest_of_graphs_are_refused(tmp_path: Path, replace: Replace) -> None:
    place = replace(tmp_path / "a.tar")
    _refuse(lambda: import_archive(Store(tmp_path / "store"), place), "a.tar", ColdstartError, OSError)
    (tmp_path / "a-pipe").unlink(missing_ok=True)
    replace(tmp_path / tables.MANIFEST)
    _refuse(lambda: tables.read_manifest(tmp_path), tables.MANIFEST, AlteredTableError)


def test_character_device_is_refused(tmp_path: Path) -> None:
    device = tmp_path / "given"
    try:
        os.mknod(device, 0o20600, os.makedev(1, 5))
    except OSError as error:
        assert error.errno in (errno.EPERM, errno.EACCES)
        pytest.skip("this machine permits no device files")
    with suppress(PermissionError):  # a file system without devices
        device.open("rb").close()
        for read in NAMED.values():
            _refuse(lambda read=read: read(device), "given", UsageError)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["host", "prompts", "key"])
def test_pipe_that_the_shell_opened_is_read(kind: str) -> None:
    reader, writer = os.pipe()
    text = b"a = 1\n"
    try:
        threading.Timer(0.2, lambda: (os.write(writer, text), os.close(writer))).start()
        found = _call(lambda: NAMED[kind](Path(f"/dev/fd/{reader}")))
    finally:
        os.close(reader)
    assert found in ({"a": 1}, ("a = 1",), "a = 1")
