"""`coldstart fleet`: requests to a running fleet."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.raw_server import HEAD_END, Asked, answering, say
from tools.shell import Run


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[str, list[Any]]]:
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
    assert "hint: use --admin-key-file FILE" in run("fleet", "status", "--url", url, code=1).stderr
    run("fleet", "scale", "m", "--min", "1", "--max", "2", *where)
    run("fleet", "drain", "s-1", *where)
    run("fleet", "remove", "m", *where)
    assert asked == [
        {"method": "scale", "model": "m", "least": 1, "most": 2},
        {"method": "drain", "server": "s-1"},
        {"method": "remove", "model": "m"},
    ]
    assert "not deployed" in run("fleet", "remove", "unknown", *where, code=1).stderr
    run("fleet", "down", *where)


def test_invalid_arguments_are_reported_at_once(run: Run, tmp_path: Path) -> None:
    assert "you have no running fleet" in run("fleet", "status", code=1).stderr
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
    assert f"cannot read fleet state {path}" in refused.stderr
