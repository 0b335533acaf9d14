"""coldstart host and fleet: errors before they listen, their status, and requests to a running one."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coldstart.commands import cli
from support.client_key_files import write_clients
from support.hosted import build_status
from tools.command_line import Run
from tools.raw_server import HEAD_END, Asked, answering, say

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.host.live.run import ModelHost

HOST_FILE = 'memory = "9MiB"\n[models.a]\nargs = []\nmemory = "4MiB"\nstart_s = 1.0\n'


def _status_document() -> dict[str, Any]:
    document = build_status("a")
    document["models"][0]["last_start"]["fallbacks"] = fallback.encode(
        [Fallback("compile", "it is not trusted")]
    )
    document["models"][1]["error"] = "no weights \x1b[31m"
    document["host"] |= {
        "runtime_template_error": "a model fits in 8.0 GiB only without the template",
        "config": {"error": "memory: invalid size 'much'"},
        "client_keys_error": "the client key file keys.toml is not TOML",
    }
    return document


@pytest.fixture
def host() -> Iterator[str]:
    """Run a server that answers /status like a host and every other path with 200 and an empty document."""

    def respond(connection: socket.socket, asked: Asked) -> None:
        status = {"Bearer wrong": 401, "Bearer laptop": 403}.get(asked.headers.get("authorization", ""), 200)
        refusal = {"error": {"message": "client laptop has no admin access"}} if status == 403 else {}
        say(connection, _status_document() if asked.path == "/status" and status == 200 else refusal, status)

    with answering(respond) as server:
        yield server.url


def test_status_as_a_table(run: Run, host: str) -> None:
    said = run("host", "status", "--url", host)
    lines = said.stdout.splitlines()
    assert "pid 7" in lines[0] and "memory 10.00 GiB of 15.00 GiB" in lines[0]
    assert lines[2] == "http://127.0.0.1:8000/ui  page of the host for a browser"
    rows = {line.split()[0]: line for line in lines[4:]}
    assert "ready" in rows["a"] and "snapshot 3.25 s (load weights 2.00, import </script> 1.00)" in rows["a"]
    assert "failed" in rows["b"] and "(1024.0 MiB)" in rows["b"]
    assert re.search(r"^a: prewarm 0 8 \* \* 1-5, next 2001-09-09 \d\d:46 \S+$", said.stdout, re.MULTILINE)
    assert "b: prewarm" not in said.stdout
    assert "a: fallback of the last start: compile: it is not trusted\n" in said.stdout
    assert "b: no weights \\x1b[31m" in said.stdout
    assert "no runtime template: a model fits in 8.0 GiB only without the template" in said.stdout
    assert "configuration not applied: memory: invalid size 'much'" in said.stdout
    refused = (
        "client keys not applied, the previous keys remain valid: the client key file keys.toml is not TOML"
    )
    assert refused in said.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("host run", "no model is specified"),
        ("host --memory 1GiB", "no model is specified"),
        ("host --host-file /nowhere/host.toml", "cannot read the host file"),
        ("host tiny-llama", "--memory is required"),
        ("host --host-file h.toml --idle 5", "--idle and arguments after -- apply only to models on the"),
        ("host --host-file h.toml -- --seed 1", "hint: set idle_s and args in h.toml"),
        (
            "host bogus",
            "hint: run `coldstart host tiny-llama --memory 60GiB`, or see `coldstart host --help`",
        ),
        ("host ./absent --memory 1GiB", "expected an alias, an existing directory, or OWNER/NAME"),
        ("host statsu", "hint: see `coldstart host status --help`"),
        ("host run tiny-lama", "hint: run `coldstart host tiny-llama --memory"),
        ("host /etc/hostname", "hint: run `coldstart host --host-file /etc/hostname"),
        ("host tiny-llama --memory lots", "invalid size 'lots'"),
        ("host tiny-llama --memory 920", "hint: use --memory 920MiB"),
        ("host tiny-llama --memory 1GiB --policy gdsf", "hint: use one of: lru, iam, predictive"),
        ("host tiny-llama --memory 1GiB --on-miss x", "on_miss"),
        ("host tiny-llama --memory 1GiB --ready-timeout -1", "ready_timeout_s: invalid duration"),
    ],
)
def test_host_reports_invalid_arguments_before_it_starts(
    run: Run, home: Path, words: str, complaint: str
) -> None:
    assert complaint in run(*words.split(), code=2).stderr
    assert not list(home.rglob("tiny-llama")), "the model was built first"


@pytest.mark.parametrize(
    ("lines", "options", "warned"),
    [
        ('models = ["aa"]', (), True),
        ('models = ["a"]', ("--api-key-file", "operator.key"), False),
        ("admin = true", (), False),
    ],
)
def test_keys_that_open_nothing_are_warned_about(
    home: Path, run: Run, lines: str, options: tuple[str, ...], warned: bool
) -> None:
    write_clients(home, {"laptop": lines})
    (home / "operator.key").write_text("key-of-operator\n")
    (home / "operator.key").chmod(0o644)
    (home / "laptop.key").chmod(0o600 if warned else 0o644)
    (home / "host.toml").write_text(HOST_FILE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        files = ("--host-file", "host.toml", "--client-keys", "keys.toml", "--port", port)
        said = run("host", *files, *options, code=2).stderr
    assert f"cannot listen at 127.0.0.1:{port}: another process listens there" in said
    assert re.search(r"^hint: choose another port: --port \d+$", said, re.MULTILINE)
    exposed = ["operator.key"] * bool(options) + ["laptop.key"] * (not warned)
    assert re.findall(r"other users can read \S+ \(hint: run `chmod 600 (\S+)`\)", said) == exposed
    assert ("(hint: --api-key-file FILE, or admin = true for a client)" in said) == warned
    assert ("client laptop is allowed to use model aa" in said) == warned


def test_first_lines_name_the_address_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "host.toml"
    file.write_text(HOST_FILE)
    url = "http://127.0.0.1:1"
    monkeypatch.setattr(ModelHost, "run", lambda host: host.on_listening(url, host.file) or 0)
    cli.load("host").main(["--host-file", str(file)], standalone_mode=False)
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first == "http://127.0.0.1:1  host of a, memory limit 9.0 MiB"
    assert second.startswith("http://127.0.0.1:1/ui ")


@pytest.mark.parametrize(
    ("error", "key", "hint"),
    [
        ({"hint": 'write memory = "9GiB"'}, None, 'write memory = "9GiB"'),
        ({}, "operators", "run `coldstart host status --url {url} --api-key-file FILE`"),
        ({}, None, "run `coldstart host status --url {url}`"),
    ],
)
def test_hint_of_a_refused_order_works_with_the_key_and_contains_no_other(
    run: Run, error: dict[str, str], key: str | None, hint: str
) -> None:
    def respond(connection: socket.socket, asked: Asked) -> None:
        say(connection, {"error": {"message": "no model"} | error}, 400)

    with answering(respond) as server:
        words = ("host", "reload", "--url", server.url, *(["--api-key", key] if key else []))
        lines = f"error: the host refused the request: no model\nhint: {hint.format(url=server.url)}\n"
        assert run(*words, code=1).stderr.endswith(lines)


@pytest.fixture
def running() -> Iterator[tuple[str, list[Any]]]:
    """Run a fake gateway of a fleet; yield its URL and the received orders."""
    asked: list[Any] = []
    status = {
        "gateway": {"url": "u", "pid": 7, "uptime_s": 5.0, "requests": 9, "held": 1, "in_flight": 2,
                    "readmitted": 0, "refused": {},
                    "client_keys_error": "keys.toml is not TOML"},
        "servers": [{"name": "s-1", "free_bytes": [1 << 30], "memory_bytes": 2 << 30, "draining": True,
                     "network_bytes_s": 1e9, "observed_bytes_s": 5e8}],
        "models": [
            {"name": "m", "least": 0, "most": 2, "waiting": 1, "error": "no weights", "groups": [
                {"name": "m#1", "phase": "serving", "in_flight": 2, "capacity": 8, "mode": "fresh", "start_s": 2.0,
                 "workers": [{"server": "s-1", "device": 0}]},
            ]},
        ],
    }  # fmt: skip

    def respond(connection: socket.socket, request: Asked) -> None:
        if request.method == "GET":
            allowed = request.headers.get("x-coldstart-admin-key") == "k"
            return say(connection, status, 200) if allowed else say(connection, {}, 401)
        asked.append(json.loads(request.raw.partition(HEAD_END)[2] or b"{}"))
        if asked[-1].get("model") == "unknown":
            return say(connection, {"error": {"message": "not deployed"}}, 400)
        return say(connection, {})

    with answering(respond) as server:
        yield server.url, asked


def test_commands_show_and_change_a_running_fleet(run: Run, running: tuple[str, list[Any]]) -> None:
    url, asked = running
    where = ["--url", url, "--admin-key", "k"]
    shown = run("fleet", "status", *where).stdout
    assert "m#1 serving on s-1:0: in flight 2 of 8, fresh in 2.00 s" in shown
    assert "/s configured" in shown and "/s observed" in shown
    assert "client keys not applied, the previous keys remain valid: keys.toml is not TOML" in shown
    assert "draining" in shown and "no weights" in shown
    assert (
        json.loads(run("fleet", "status", *where, "--format", "json").stdout)["servers"][0]["name"] == "s-1"
    )
    assert "hint: pass --admin-key-file FILE" in run("fleet", "status", "--url", url, code=1).stderr
    run("fleet", "scale", "m", "--min", "1", "--max", "2", *where)
    run("fleet", "drain", "s-1", *where)
    run("fleet", "remove", "m", *where)
    assert asked == [
        {"method": "scale", "model": "m", "least": 1, "most": 2},
        {"method": "drain", "server": "s-1"},
        {"method": "remove", "model": "m"},
    ]
    assert "not deployed" in run("fleet", "remove", "unknown", *where, code=1).stderr
    limits = ("--slo", "ttft=5", "--memory", "1GiB", "--start", "2", "--on-miss", "warn")
    deployed = run("fleet", "deploy", "tiny-llama", *limits, *where).stderr
    for ranks in (2, 3, 4):
        command = f"coldstart materialize tiny-llama -- --pipeline-parallel-size {ranks}"
        assert f"no start will use {ranks} servers: no bundle exists (run `{command}`)" in deployed
    run("fleet", "down", *where)


def test_invalid_arguments_are_reported_at_once(run: Run) -> None:
    assert "no fleet of this user is running" in run("fleet", "status", code=1).stderr
    assert "no fleet responds" in run("fleet", "status", "--url", "http://127.0.0.1:9", code=1).stderr
    assert "--memory" in run("fleet", "join", "127.0.0.1:1", code=2).stderr
    both = run("fleet", "up", "--address", "127.0.0.1:1", "--memory", "1GB", code=2)
    assert "not to the one at --address" in both.stderr
    unitless = run("fleet", "up", "--memory", "60", code=2)
    assert "hint: use --memory 60MiB" in unitless.stderr
    assert "expected METRIC=SECONDS" in run("fleet", "deploy", "m", "--slo", "fast", code=2).stderr


def test_up_refuses_a_foreign_state_file_before_it_starts_ray(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{}]")
    refused = run("fleet", "up", "--state", str(path), "--port", "0", code=2)
    assert f"cannot read the fleet state in {path}" in refused.stderr
