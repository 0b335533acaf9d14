"""A second user of the machine attacks files, keys, sockets, templates, shared memory and temporary names of the first.

A real process with another user id makes each attempt on files that the tool created.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from attacks.conftest import STRANGER
from attacks.second_user import (
    CONTROLS,
    MARKER,
    Act,
    Attack,
    attack_process,
    connect,
    end,
    hold,
    link,
    list_files,
    list_names,
    overwrite,
    plant,
    read,
    read_environment,
    read_memory,
    replace,
    steal_file,
    trace,
    won,
)
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.store import Store
from tools import tiny_models
from tools.bundles import CODE, publish_sections, write_tree

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import template_pool
from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import scratch
from coldstart.system.proc.tree import ProcessTree
from coldstart.system.snapshot import runtime_image
from coldstart.system.trust.unpacked import unpack_section
from coldstart.validate.checks import check

SECRET = b"memory of a process"


@dataclass(frozen=True)
class Victim:
    """Files and template of one user, with the file modes that the tool sets."""

    tmp: Path
    store: Store
    image: Path
    code: Path
    warm: template_pool.RunningTemplate
    scratch: Path
    segment: Path


@pytest.fixture
def tmp(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of temporary files that every user can write to, the only place for sockets."""
    tmp = home / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    home.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    return tmp


@pytest.fixture(params=[0, 0o022])
def victim(
    request: pytest.FixtureRequest, tmp: Path, tmp_path: Path, fake_engine: Callable[[str], None]
) -> Iterator[Victim]:
    previous = os.umask(request.param)  # with 0, every mode must be the tool's own decision
    fake_engine("serves")
    store = Store(paths.Cache.at().bundles)
    signer = sign.load_host_key(paths.state_dir())
    bundle = publish_sections(store, signer=signer, compile=write_tree(tmp_path / "code", CODE))
    code = unpack_section(bundle, "compile", paths.Cache.at().unpacked, inspection.trust)
    image = runtime_image.choose_engine_image_directory(paths.Cache.at().runtimes, bundle.digest)
    with runtime_image.publish_image(image) as partial:
        (partial / "pages-1.img").write_bytes(SECRET)
    warm = template_pool.start_template(
        "engine", LaunchPlan(["serves"], key="sha256:" + "a" * 64), "tiny", 20
    )
    # As the processes of a vLLM server share tensors.
    shared = SharedMemory(create=True, size=64)
    try:
        with scratch.use_scratch_directory() as own:
            yield Victim(tmp, store, image, code, warm, own, Path("/dev/shm", shared.name))
    finally:
        shared.close()
        shared.unlink()
        os.umask(previous)
        template_pool.stop_template(warm, force=True)


def _attacks_on_the_cache(v: Victim) -> list[Attack]:
    """Return attacks on directories whose modes the user's umask decides."""
    cache, blob = Cache.at().root, blob_path(v.store.root, v.store.list_bundles()[0].digest)
    return [
        Attack("overwrite the manifest of a bundle", overwrite, blob),
        Attack("replace the manifest of a bundle", replace, blob),
        Attack("overwrite the index of the store", overwrite, v.store.root / "index.json"),
        Attack("replace the store", replace, v.store.root),
        Attack("plant a blob", plant, blob.parent),
        Attack("plant in the staging of the store", plant, v.store.layout.staging_dir),
        Attack("link from the staging of the store", link, v.store.layout.staging_dir),
        Attack("plant in the cache", plant, cache),
        *(Attack(f"hold the lock {path.name}", hold, path) for path in sorted(cache.rglob("*.lock"))),
    ]


def _attacks(v: Victim) -> list[Attack]:
    state, runtime, kept = paths.state_dir(), paths.runtime_dir(), paths.frozen_dir()
    secret = state / "signing" / "host.pem"
    pid = v.warm.pid
    return [
        Attack("read the image of an engine", read, v.image / "pages-1.img"),
        Attack("list the image of an engine", list_names, v.image),
        Attack("overwrite unpacked code", overwrite, v.code / "kernel.so"),
        Attack("replace unpacked code", replace, v.code / "kernel.so"),
        Attack("replace the directory of unpacked code", replace, v.code),
        Attack("add a module beside unpacked code", plant, v.code),
        Attack("replace the directory of all unpacked code", replace, v.code.parent),
        Attack("read the signing key", read, secret),
        Attack("replace the signing key", replace, secret),
        Attack("trust a key of one's own", plant, sign.trust_dir(state)),
        Attack("replace the trusted keys", replace, sign.trust_dir(state)),
        Attack("plant in the state directory", plant, state),
        Attack("write a record of what was unpacked", plant, state / "unpacked"),
        Attack("replace the records", replace, state / "unpacked"),
        Attack("connect to a template", connect, v.warm.socket),
        Attack("list the runtime directory", list_names, runtime),
        Attack("plant in the runtime directory", plant, runtime),
        Attack("replace a template's socket", replace, v.warm.socket),
        Attack("rewrite what a template was made of", overwrite, v.warm.directory / "made-of.json"),
        Attack("read a template's log", read, v.warm.directory / "log"),
        Attack("read a template's plan", read, v.warm.directory / "plan.json"),
        Attack("read a template's environment", read_environment, pid),
        Attack("read a template's memory", read_memory, pid),
        Attack("list a template's files", list_files, pid),
        Attack("steal a template's descriptor", steal_file, pid),
        Attack("debug a template", trace, pid),
        Attack("stop a template", end, pid),
        Attack("list a server's temporary files", list_names, v.scratch),
        Attack("plant a socket for a server", plant, v.scratch),
        Attack("link from a server's temporary files", link, v.scratch),
        Attack("remove the directory of temporary files", replace, v.scratch.parent),
        Attack("read shared memory", read, v.segment),
        Attack("write shared memory", overwrite, v.segment),
        Attack("list frozen state", list_names, kept),
        Attack("plant in frozen state", plant, kept),
        Attack("link from frozen state", link, kept),
    ]


@pytest.mark.slow
def test_no_attack_on_files_and_templates_succeeds(victim: Victim, stranger: Act) -> None:
    # With umask 0 the user has opened the cache to everyone. Starts then neither write to it nor run code from it.
    opened = ownership.describe_path_exposure(Cache.at().root) is not None
    tried = [*_attacks(victim), *([] if opened else _attacks_on_the_cache(victim))]
    assert len(tried) >= (35 if opened else 44) and won(stranger, tried) == {}
    assert victim.warm.ready and (victim.code / "kernel.so").read_bytes() == CODE["kernel.so"]
    assert check(victim.store.list_bundles()[0]) == []


def test_each_attack_succeeds_on_an_open_target(stranger: Act) -> None:
    place = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    place.chmod(0o777)
    for name in ("file", "movable"):
        (place / name).write_bytes(b"public")
        (place / name).chmod(0o666)
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = subprocess.Popen(["sleep", "600"], user=STRANGER, group=STRANGER, extra_groups=[])
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place / "socket"))
            (place / "socket").chmod(0o666)
            listener.listen()
            url = f"http://127.0.0.1:{server.server_port}"
            attacks = [Attack(act.__name__, act, at(place, own.pid, url)) for act, at in CONTROLS.items()]
            assert won(stranger, attacks).keys() == {one.name for one in attacks}
        assert own.wait(60) == -signal.SIGTERM
    finally:
        own.kill()
        own.wait()
        server.shutdown()
        server.server_close()
        shutil.rmtree(place)


def _squat_directory(name: Path) -> None:
    name.mkdir()
    name.chmod(0o777)


SQUATS: dict[str, Callable[[Path], object]] = {
    "directory": _squat_directory,
    "file": lambda name: name.write_bytes(MARKER),
    "link to a directory": lambda name: name.symlink_to("/var/tmp"),
    "link to a private directory": lambda name: name.symlink_to("/root"),
    "dangling link": lambda name: name.symlink_to("/nonexistent/elsewhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("squat", SQUATS)
@pytest.mark.parametrize("find", [paths.runtime_dir, paths.temporary_dir])
def test_name_taken_by_another_user_is_not_used(
    tmp: Path, stranger: Act, squat: str, find: Callable[[], Path]
) -> None:
    taken = tmp / f"coldstart-{os.getuid()}"
    stranger(lambda: SQUATS[squat](taken) and None)
    assert taken.lstat().st_uid == STRANGER
    place = find()
    assert place != taken and place.stat().st_mode & 0o777 == 0o700 and place.stat().st_uid == os.getuid()
    tried = [
        Attack("list", list_names, place),
        Attack("plant", plant, place),
        Attack("replace", replace, place),
    ]
    assert won(stranger, tried) == {} and find() == place


SERVE = "serve tiny-llama --mode fresh --on-miss warn --port 0 -- --max-model-len 64 --enforce-eager"


@pytest.fixture
def server(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "coldstart.commands.cli", *SERVE.split()]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    tiny_models.place("tiny-llama", Cache.at().models)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), (home / "log").read_text()
        yield process
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
@pytest.mark.vllm
def test_no_attack_succeeds_on_loopback(server: subprocess.Popen[bytes], stranger: Act) -> None:
    processes = sorted(ProcessTree(server.pid).list_processes(), key=lambda one: one.pid)
    sockets = [one for process in processes for one in process.net_connections("all")]
    # torch's store and gloo listen in the engine, and no option closes their ports: they must not be on a network.
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"} and listening
    paths = {one.laddr for one in sockets if isinstance(one.laddr, str) and one.laddr.startswith("/")}
    assert paths
    files = {Path(one.path) for process in processes for one in process.open_files()}
    attacks = [
        *(Attack(f"connect to {path}", connect, Path(path)) for path in sorted(paths)),
        *(
            Attack(f"{act.__name__} {path}", act, path)
            for path in files
            if "/dev/shm/" in str(path)
            for act in (read, overwrite)
        ),
        *(attack for one in processes for attack in attack_process(f"{one.name()} {one.pid}", one.pid)),
    ]
    assert won(stranger, attacks) == {}
    assert all(one.is_running() for one in processes)
