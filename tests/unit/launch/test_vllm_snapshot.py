"""Mode `snapshot` on a GPU with a fake of `vllm snapshot`, whose server is no child, has known PIDs, and may err."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.bundle import TrustResult
from support.processes import has_ended

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import fetch, ladder, modes, planning, vllm_snapshot
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server
from coldstart.models.inspection import BundleLookup
from coldstart.system import paths, runtime
from coldstart.system.ipc.addresses import find_free_port
from coldstart.vllm import gpu_starts

# `create` leaves the server that `restore` releases, because CRIU gives a restored process its own PID again.
FAKE = """
import http.server, json, os, pathlib, signal, subprocess, sys, time
words = sys.argv[1:]
behaviour = os.environ.get("FAKE_SNAPSHOT", "")
if words[0] == "serve":
    place = pathlib.Path(words[1])
    while not (place / "release.json").exists():
        time.sleep(0.01)
    release = json.loads((place / "release.json").read_text())
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = [0] if release["behaviour"] == "other-tokens" else [asked["prompt"][0] + 1, asked["max_tokens"]]
            body = json.dumps({"choices": [{"token_ids": tokens, "text": ""}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_): pass
    server = http.server.HTTPServer((release["host"], release["port"]), Handler)
    (place / "listening").write_text("")
    server.serve_forever()
if behaviour == "fails":
    sys.exit(f"RuntimeError: vllm {words[1]} found no device")
if words[:2] == ["snapshot", "create"]:
    place = pathlib.Path(words[-1])
    place.mkdir(mode=0o700)
    quiet = {"start_new_session": True, "stdin": -3, "stdout": -3, "stderr": -3}
    server = subprocess.Popen([sys.executable, __file__, "serve", str(place)], **quiet)
    worker = subprocess.Popen(["sleep", "600"], **quiet)
    engine = words[2:-2]
    revision = engine[engine.index("--revision") + 1]
    (place / "manifest.json").write_text(json.dumps({"model": engine[0], "model_revision": revision,
        "engine_argv": engine, "process_tree": [server.pid, worker.pid]}))
else:
    place = pathlib.Path(words[2])
    release = {"host": words[4], "port": int(words[6]), "behaviour": behaviour}
    (place / "release.part").write_text(json.dumps(release))
    os.rename(place / "release.part", place / "release.json")
    while not (place / "listening").exists():
        time.sleep(0.01)
"""
CANARY = {"prompt": [4], "tokens": [5, 2]}
COMMIT = "a" * 40
Start = Callable[..., Server]


@pytest.fixture
def hub(lookup: BundleLookup) -> BundleLookup:
    return replace(lookup, model=replace(lookup.model, repo_id="org/tiny", revision=COMMIT))


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Simulate vLLM's GPU build, the tools and `vllm snapshot`."""
    script, tools, real = tmp_path / "fake_vllm.py", tmp_path / "tools", sys.executable
    script.write_text(FAKE)
    tools.mkdir()
    for tool in ("criu", "cuda-checkpoint", "nvidia-smi", "sudo", "cuda_plugin.so"):
        (tools / tool).write_text("")
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv(gpu_starts.PLUGINS, str(tools))
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    for name in ("build_create_command", "build_restore_command"):
        original = getattr(gpu_starts, name)
        monkeypatch.setattr(
            gpu_starts, name, lambda *given, _original=original: [real, str(script), *_original(*given)[3:]]
        )


@pytest.fixture
def snapshot(hub: BundleLookup) -> Iterator[list[int]]:
    """Write a snapshot and return the PIDs of its processes."""
    assert hub.bundle is not None
    vllm_snapshot.create_snapshot(hub, hub.bundle)
    assert vllm_snapshot.has_snapshot(hub, hub.bundle)
    place = vllm_snapshot._place(hub, hub.bundle)
    tree = json.loads((place / "manifest.json").read_text())["process_tree"]
    yield tree
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(hub: BundleLookup, fake_engine: Callable[[str], None]) -> Iterator[Callable[..., Server]]:
    """Return start(mode), which starts a server; `fresh` is a fake engine."""
    fake_engine("serves")
    started: list[Server] = []

    def serve(mode: str = "snapshot", lookup: BundleLookup = hub, *words: str, **plan: Any) -> Server:
        listen = ["--host", "127.0.0.1", "--port", str(find_free_port("127.0.0.1")), *words]
        request = ServeRequest(lookup, listen, mode=mode, ready_timeout=60)
        made = LaunchPlan(Arguments(("serves", *listen)), canary=CANARY, **plan)
        started.append(ladder.start_server(request, made))
        return started[-1]

    yield serve
    for one in started:
        one.stop()


def test_vllm_restores_a_server_that_gives_the_tokens_of_the_bundle(
    snapshot: list[int], start: Start
) -> None:
    server = start()
    assert (server.mode, server.pid, server.fallbacks) == ("snapshot", snapshot[0], ())
    document = server.document()
    assert document["canary"] is True and document["tokens"] == CANARY["tokens"]
    assert document["fast_path"] == {"mode": True, "snapshot": True}
    assert server.is_running() and not has_ended(snapshot[1])
    assert server.stop() == 0
    assert all(map(has_ended, snapshot)), "the engine's processes end with the server"


def test_a_server_that_ends_by_itself_is_noticed(snapshot: list[int], start: Start) -> None:
    server = start()
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait(30) == 1
    assert all(map(has_ended, snapshot))


def test_other_tokens_end_the_restored_server_before_the_start_goes_on(
    snapshot: list[int], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SNAPSHOT", "other-tokens")
    server = start()
    assert server.mode == "fresh" and all(map(has_ended, snapshot))
    assert "tokens differ from the bundle's canary" in server.fallbacks[0].reason


def test_a_failed_restore_is_a_fallback_with_vllms_reason(
    snapshot: list[int], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SNAPSHOT", "fails")
    server = start()
    assert server.mode == "fresh"
    assert "RuntimeError: vllm restore found no device" in server.fallbacks[0].reason
    assert "--snapshot" in str(server.fallbacks[0].hint)


def test_other_arguments_are_refused(snapshot: list[int], start: Start, hub: BundleLookup) -> None:
    server = start("snapshot", replace(hub, vllm_args=Arguments(("--seed", "1"))))
    assert server.mode == "fresh" and "the engine_argv of the snapshot is" in server.fallbacks[0].reason
    assert not any(map(has_ended, snapshot)), "nothing was released"


@pytest.mark.parametrize(
    ("words", "reason"), [(("--api-key", "k"), "without an API key"), ((), "no snapshot of this bundle")]
)
def test_limits_are_reasons_before_anything_runs(
    start: Start, hub: BundleLookup, words: tuple[str, ...], reason: str
) -> None:
    server = start("snapshot", hub, *words)
    assert server.mode == "fresh"
    assert reason in server.fallbacks[0].reason and server.fallbacks[0].hint


def test_snapshots_of_a_gpu_are_used_only_if_they_are_requested(
    snapshot: list[int], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start("auto").mode == "fresh"
    assert "snapshot" not in [mode.name for mode in modes.list_modes_to_try("auto")]
    monkeypatch.setenv(gpu_starts.PLUGINS, "/nowhere")
    assert "snapshot" in modes.list_unusable_modes()


def test_a_failed_creation_leaves_no_snapshot(hub: BundleLookup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.bundle is not None
    monkeypatch.setenv("FAKE_SNAPSHOT", "fails")
    with pytest.raises(CommandFailedError, match="vllm create found no device"):
        vllm_snapshot.create_snapshot(hub, hub.bundle)
    assert not vllm_snapshot.has_snapshot(hub, hub.bundle)
    local = replace(hub, model=replace(hub.model, repo_id=None, revision=None))
    with pytest.raises(CommandFailedError, match="a hub model"):
        vllm_snapshot.create_snapshot(local, hub.bundle)


def test_preloaded_weights_have_the_digest_of_the_model(
    hub: BundleLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tune has other weights than its base, and so another directory, though all headers are equal."""
    assert hub.model.path is not None
    monkeypatch.setattr(fetch.resolution, "ensure_weights", lambda model, offline: model)
    places = {}
    for digest in ("sha256:" + "1" * 64, "sha256:" + "2" * 64):
        monkeypatch.setattr(fetch.weights, "read_or_compute_digest", lambda *_, digest=digest: digest)
        found = fetch.choose_weights_source(hub, fetch.PRELOADED)
        assert not found.arguments.contains_flag("load_format")
        (one,) = found.fallbacks
        assert "no vllm preload daemon has these weights" in one.reason
        places[digest] = Path(str(Arguments(str(one.hint).split()[2:]).get_value("weight_cache_socket_dir")))
    base, tuned = places.values()
    assert base != tuned and base.parent == paths.runtime_dir()
    tuned.mkdir()
    (tuned / "vllm_weight_cache_0.sock").touch()
    found = fetch.choose_weights_source(hub, fetch.PRELOADED)
    assert found.fallbacks == [] and found.arguments.get_value("load_format") == "ipc_cache"
    assert found.arguments.get_value("model_loader_extra_config") == {"socket_dir": str(tuned)}
    rejected = TrustResult(False, None, "another key")
    request = ServeRequest(hub, weights_from=fetch.PRELOADED, trust=lambda _: rejected)
    (one,) = (one for one in planning.plan(request).fallbacks if one.stage == "weights")
    assert "the bundle is not trusted: another key" in one.reason and "trust add" in str(one.hint)
    asleep = replace(hub, vllm_args=Arguments(("--enable-sleep-mode",)))
    (one,) = fetch.choose_weights_source(asleep, fetch.PRELOADED).fallbacks
    assert "--enable-sleep-mode" in one.reason
