"""coldstart up and down without an engine: what a failed build changes, and what is stopped."""

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from coldstart.commands import _serving, cli, up
from coldstart.commands._options import Common
from coldstart.commands._output import Output
from support.engines import hold_model
from tools.bundles import key
from tools.command_line import main

from coldstart.contract.arguments import Arguments
from coldstart.errors import CommandFailedError
from coldstart.launch import preparation, template_pool, up_records
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.start_progress import StartProgress


@pytest.fixture
def lookup(home: Path, model: ResolvedModel) -> BundleLookup:
    return BundleLookup(model, Arguments(), Cache.at(), key())


@pytest.fixture
def common(lookup: BundleLookup) -> Common:
    return Common(Output(), False, lookup.cache, Arguments())


@pytest.fixture
def supervisor(lookup: BundleLookup) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the model's lock and is recorded as its supervisor."""
    with hold_model(lookup) as (process, own):
        up_records.find_directory(lookup).write(replace(own, url="http://x:1", mode="fresh"))
        yield process


@pytest.mark.parametrize(
    "error", [CommandFailedError("no memory", hint="use less"), OSError(28, "No space left")]
)
def test_a_model_is_served_without_a_bundle_if_none_can_be_built(
    error: Exception,
    lookup: BundleLookup,
    common: Common,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_serving, "build_bundle", Mock(side_effect=error))
    assert up._ensure_bundle(common, lookup) is lookup
    assert f"warning: no bundle was built: {error}" in capsys.readouterr().err


def down(*words: str) -> None:
    assert main("down", *words) == 0


def test_down_stops_the_named_model_alone(
    supervisor: subprocess.Popen[bytes],
    lookup: BundleLookup,
    model: ResolvedModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    down("another-model")
    assert capsys.readouterr().out == "no server or template of another-model is up\n"
    assert supervisor.poll() is None
    down(str(model.path))
    assert capsys.readouterr().out == f"stopped the server of {model.path} at http://x:1\n"
    assert supervisor.wait(20) == -15 and up_records.list_directories(lookup.cache) == []


def test_down_makes_a_supervisor_kill_a_server_that_hangs(
    lookup: BundleLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor kills its server at the second SIGTERM."""
    script = "trap 'trap exit TERM' TERM; echo; while :; do sleep 0.01; done"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    own, birth = up_records.create_own_record(lookup), processes.read_identity(process.pid)
    monkeypatch.setattr(up_records, "STOP_TIMEOUT_S", 1.0)
    up_records.stop_supervisor(replace(own, pid=process.pid, birth=birth))
    assert process.wait() >= 0


@pytest.mark.parametrize("variable", ["COLDSTART_CACHE_DIR", "XDG_STATE_HOME"])
@pytest.mark.parametrize("words", [(), ("MODEL",)])
def test_down_retains_the_servers_of_another_store(
    variable: str,
    words: tuple[str, ...],
    supervisor: subprocess.Popen[bytes],
    lookup: BundleLookup,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "other"))
    elsewhere = replace(lookup, cache=Cache.at())
    assert up_records.find_directory(elsewhere).read() is None
    down(*(str(lookup.model.path) for _ in words))
    assert "is up\n" in capsys.readouterr().out and supervisor.poll() is None
    monkeypatch.undo()


def test_up_reports_that_down_ended_it(
    lookup: BundleLookup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object) -> BundleLookup:
        assert (record := up_records.find_directory(lookup).read()) is not None
        assert record.pid == os.getpid() and record.planned_url == f"http://127.0.0.1:{port}"
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM ends the command")

    port = find_free_port()
    monkeypatch.setattr(_serving, "look_up_model", lambda *_, **__: lookup)
    monkeypatch.setattr(up, "_ensure_bundle", end)
    assert main("up", str(lookup.model.path), "--port", str(port)) == 143
    shown = capsys.readouterr().err
    assert f"SIGTERM, which coldstart down sends, stopped {lookup.model.path}.\n" in shown
    assert up_records.find_directory(lookup).read_last() is None


@pytest.mark.parametrize("keeps", [False, True])
def test_down_stops_the_template_unless_it_is_to_be_kept(
    keeps: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = SimpleNamespace(level="engine", model="tiny", pid=7, owner=("store", "tiny", "/tiny"))
    stopped: list[object] = []
    monkeypatch.setattr(preparation, "list_prepared", lambda _: [warm])
    monkeypatch.setattr(template_pool, "stop_template", stopped.append)
    down("tiny", *(["--keep-template"] if keeps else []))
    out, err = capsys.readouterr()
    assert stopped == ([] if keeps else [warm]) and ("stopped the engine template" in out) != keeps
    assert ("next coldstart up prepares the template again" in err) != keeps


@pytest.mark.parametrize(
    ("how", "shows"),
    [([], True), (["--quiet"], False), (["--format", "json"], False), (["-o", "/dev/full"], False)],
)
def test_up_names_a_request_that_works_and_records_the_server(
    how: list[str],
    shows: bool,
    lookup: BundleLookup,
    fake_engine: Callable[[str], None],
    prepared: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fake_engine("serves")
    monkeypatch.setattr(_serving, "look_up_model", lambda *_, **__: lookup)
    assert main("up", str(lookup.model.path), "--detach", "--port", "0", *how) == 2 * ("/dev/full" in how)
    found = re.findall(r"^Try: (.*)$", capfd.readouterr().err, re.M)
    record = up_records.find_directory(lookup).read()
    assert bool(found) == shows and record is not None
    if shows:
        program, url, *options = shlex.split(found[0])
        assert (program, url) == ("curl", f"{record.url}/v1/completions")
        assert json.loads(options[-1])["model"] == "tiny"
    down()


API_KEYS = (("--api-key", "PLANTED-one"), ("--api-key", "PLANTED-two"))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare nothing and build no bundle, in commands that show both steps."""

    def prepare(
        _lookup: object, _plan: object, phase: preparation.Phase, *_: object
    ) -> preparation.Preparation:
        with phase("start a template (engine)"):
            return preparation.Preparation(None, False, ())

    monkeypatch.setattr(preparation, "prepare_fastest", prepare)
    monkeypatch.setattr(up, "_ensure_bundle", lambda _, lookup: lookup)


@pytest.fixture
def reach(
    lookup: BundleLookup, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Return reach(running, asked, between), which runs `up` with the arguments `asked` beside a server that has `running`.

    `between` is called after the server was recorded.
    """

    def run(
        running: tuple[str, ...], asked: tuple[str, ...] | None, between: Callable[[], object] = lambda: None
    ) -> int:
        directory = up_records.find_directory(lookup)
        record = directory.read()
        assert record is not None
        own = up_records.create_own_record(replace(lookup, vllm_args=Arguments(running)))
        directory.write(replace(record, salt=own.salt, settings=own.settings))
        between()
        now = replace(lookup, vllm_args=Arguments(asked or ()))
        monkeypatch.setattr(_serving, "look_up_model", lambda *_, **__: now)
        return main("up", str(lookup.model.path), *(() if asked is None else ("--", *asked)))

    return run


@pytest.mark.parametrize(
    ("running", "asked", "named"),
    [
        (*API_KEYS, "API key"),
        ((), API_KEYS[0], "API key"),
        (API_KEYS[0], (), "API key"),
        (("--api-key", "1000"), ("--api-key", "1e3"), "API key"),
        (("--api-key", "a;$(b)"), ("--api-key", "a;$(c)"), "API key"),
        (("--hf-token", "PLANTED-one"), ("--hf-token", "PLANTED-two"), "--hf-token"),
        ((), ("--served-model-name", "other"), "--served-model-name"),
        (("--served-model-name", "a", "b"), ("--served-model-name", "a"), "--served-model-name"),
        ((), ("--chat-template", "{{ x }}" * 999), "--chat-template"),
        (("--middleware", "a"), ("--middleware", "b", "--middleware", "a"), "--middleware"),
        (("--generation-config", "auto"), ("--generation-config", "vllm"), "--generation-config"),
        (
            ("--default-chat-template-kwargs", '{"auth_token": "PLANTED-one"}'),
            ("--default-chat-template-kwargs", '{"auth_token": "PLANTED-two"}'),
            "--default-chat-template-kwargs",
        ),
        ((*API_KEYS[0], "--response-role", "x"), (), "--response-role, API key"),
    ],
)
def test_up_fails_and_names_the_arguments_that_a_running_server_does_not_have(
    running: tuple[str, ...],
    asked: tuple[str, ...],
    named: str,
    reach: Callable[..., int],
    home: Path,
    lookup: BundleLookup,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reach(running, asked) == 1
    shown = capsys.readouterr()
    there = f"{lookup.model.path} is already up at http://x:1 with different settings: {named}"
    assert f"{there}\nhint: run `coldstart down {lookup.model.path}`, then `coldstart up`\n" in shown.err
    assert shown.out == "" and "PLANTED" not in shown.err
    stored = [path for path in home.rglob("*") if path.is_file()]
    assert stored and [path for path in stored if b"PLANTED" in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("running", "asked"),
    [
        (("--api-key", "k", "--response-role", "x"), ("--response-role=x", "--api_key=k")),
        (("--host", "127.0.0.1", "--port", "1"), ()),
    ],
)
def test_up_finds_a_running_server_whose_arguments_are_spelt_otherwise(
    running: tuple[str, ...],
    asked: tuple[str, ...],
    reach: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert reach(running, asked) == 0
    shown = capsys.readouterr()
    assert "http://x:1  fresh, already up" in shown.out and shown.err == ""


@pytest.mark.parametrize(
    ("running", "asked", "code", "names"),
    [
        ("PLANTED-one", "PLANTED-two", 1, "API key"),
        ("", "PLANTED-two", 1, "API key"),
        ("PLANTED-one", "", 0, "API key"),
        ("PLANTED-one", "PLANTED-one", 0, ""),
    ],
)
def test_up_fails_if_a_running_server_requires_another_key_than_the_environment_has(
    running: str,
    asked: str,
    code: int,
    names: str,
    reach: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", running)
    assert reach((), None, lambda: monkeypatch.setenv("VLLM_API_KEY", asked)) == code
    shown = capsys.readouterr()
    assert ("already up" in shown.out) is (code == 0) and "PLANTED" not in shown.err
    assert (f"is already up at http://x:1 with different settings: {names}" in shown.err) is bool(names)


def bring_up(lookup: BundleLookup, barrier: Any, directory: Path, words: tuple[str, ...]) -> None:
    """Run `up` for the look-up, at one moment with the other process of the barrier; write its output to `directory`."""
    directory.mkdir()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / name, os.O_CREAT | os.O_WRONLY), number)
        setattr(sys, f"std{name}", os.fdopen(number, "w"))
    _serving.look_up_model = lambda *_, **__: lookup  # type: ignore[assignment]
    barrier.wait()
    cli.main(["up", str(lookup.model.path), "--detach", "--port", "0", "--format", "json", *words])


@pytest.fixture
def bring_two_up(
    lookup: BundleLookup, fake_engine: Callable[[str], None], prepared: None, tmp_path: Path
) -> Iterator[Callable[..., list[Path]]]:
    """Return bring_two_up(round, *words), which runs `up` twice at one moment with other arguments on fake engines.

    `lookups` are those of the two commands, and `codes` their exit codes in ascending order.
    """
    fake_engine("serves")
    other = replace(lookup, vllm_args=Arguments(("--max-model-len", "64")), key=key(max_model_len=64))
    fork = multiprocessing.get_context("fork")

    def bring(
        number: int,
        *words: str,
        lookups: tuple[BundleLookup, BundleLookup] = (lookup, other),
        codes: tuple[int, int] = (0, 0),
    ) -> list[Path]:
        barrier = fork.Barrier(2)
        outputs = [tmp_path / f"{number}-{one}" for one in range(2)]
        processes = [
            fork.Process(target=bring_up, args=(one, barrier, output, words))
            for one, output in zip(lookups, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        errors = [(output / "err").read_text() for output in outputs]
        assert tuple(sorted(process.exitcode or 0 for process in processes)) == codes, errors
        return outputs

    yield bring
    down()


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_two_commands_at_one_moment_start_one_server(
    bring_two_up: Callable[..., list[Path]],
    lookup: BundleLookup,
    capsys: pytest.CaptureFixture[str],
    rounds: int,
) -> None:
    for number in range(rounds):
        outputs = bring_two_up(number, "--capture", "deferred")
        reports = [json.loads((output / "out").read_text()) for output in outputs]
        records = [directory.read() for directory in up_records.list_directories(lookup.cache)]
        (record,) = filter(None, records)
        assert record.url == record.planned_url and record.url.startswith("http://127.0.0.1:")
        assert b"--capture\0deferred\0" in Path(f"/proc/{record.pid}/cmdline").read_bytes()
        down("--format", "json")
        (server,) = json.loads(capsys.readouterr().out)["servers"]
        (began,) = [one for one in reports if not one.get("already_up")]
        assert began["preparation"]["mode"] is None and began["preparation"]["seconds"] >= 0
        (known,) = [one for one in reports if one.get("already_up")]
        assert known["pid"] == server["pid"]
        assert known["log"] == began["log"] == record.log
        down()
        assert capsys.readouterr().out == "no server or template of any model is up\n"


def test_up_after_one_that_was_killed_in_the_middle_starts_a_server(
    bring_two_up: Callable[..., list[Path]], lookup: BundleLookup
) -> None:
    directory = up_records.find_directory(lookup)
    fork = multiprocessing.get_context("fork")
    claimed = fork.Event()

    def claim() -> None:
        directory.claim(lambda: None)
        directory.write(up_records.create_own_record(replace(lookup, vllm_args=Arguments(API_KEYS[0]))))
        claimed.set()
        signal.pause()

    killed = fork.Process(target=claim)
    killed.start()
    assert claimed.wait(60)
    killed.kill()
    killed.join()
    directory.log.write_text("the last words of the killed server")
    down("another-model")
    assert directory.log.exists()
    outputs = bring_two_up(0, "--", *API_KEYS[1], lookups=(lookup, lookup))
    assert sum(f"process {killed.pid} has exited" in (output / "err").read_text() for output in outputs) == 1
    reports = [json.loads((output / "out").read_text()) for output in outputs]
    assert sum(bool(one.get("already_up")) for one in reports) == 1
    assert len({one["url"] for one in reports}) == 1


@pytest.mark.parametrize("detached", [False, True])
def test_progress_off_a_terminal(detached: bool, common: Common, capsys: pytest.CaptureFixture[str]) -> None:
    for progress, events in (("auto", []), ("none", []), ("json", ["begin", "step", "end"])):
        shown = replace(common, out=Output(progress=progress))  # type: ignore[arg-type]
        with _serving.show_start(shown, detached=detached) as show:
            show(StartProgress("load weights", 1, 2, "shards"))
        out, err = capsys.readouterr()
        assert out == "" and [json.loads(line)["event"] for line in err.splitlines()] == events
