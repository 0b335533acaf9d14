"""Whatever the hub answers, a complete copy in the cache is used; without one the error names the answer."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from http import HTTPStatus
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.tools import raw_server
from tests.tools.raw_server import Asked

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
REVISIONS = (COMMIT, "main", "elsewhere")
COPIES = ("complete", "incomplete", "empty")
SHARD = "model-00002-of-00002.safetensors"
STATUSES = (400, 401, 403, 404, 429, 500, 503)
# As the hub itself says it.
CODES = {
    "gated": (403, "GatedRepo", "is gated"),
    "gated-without-a-login": (401, "GatedRepo", "is gated"),
    "no-repository": (404, "RepoNotFound", "404 Not Found"),
    "hidden-repository": (401, "RepoNotFound", "401 Unauthorized"),
    "no-revision": (404, "RevisionNotFound", "no such revision"),
}
SLOW = ("silent", "dribbles")
_SCRIPT = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from coldstart.errors import ColdstartError
from coldstart.models import resolution
def start(case):
    repository, revision = case
    try:
        model = resolution.resolve(repository, revision=revision)
        return {"path": str(resolution.ensure_weights(model).path)}
    except ColdstartError as error:
        return {"code": error.exit_code, "message": error.message, "hint": error.hint}
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    print(json.dumps([*pool.map(start, json.load(sys.stdin))]))
"""


def _answer(connection: socket.socket, asked: Asked) -> None:
    *_, named = asked.path.removeprefix("/api/models/acme/").split("/")[0].partition(".")
    # huggingface_hub asks for more than the repository.
    kind = named or "404"
    if kind.isdecimal():
        raw_server.answer(connection, int(kind), {}, b"no")
    elif kind in CODES:
        status, code, _ = CODES[kind]
        raw_server.answer(connection, status, {"X-Error-Code": code})
    elif kind == "dribbles":
        raw_server.dribble(connection, b"HTTP/1.1 200 OK\r\nX-Long: a", 0.2)
    else:
        connection.recv(1)


def _cache(home: Path, repository: str, copy: str) -> Path:
    """Write the copy of acme/REPOSITORY as `hf download` does, and return the directory of its commit."""
    place = home / "hub" / f"models--acme--{repository}"
    snapshot = place / "snapshots" / COMMIT
    if copy != "empty":
        for directory in (snapshot, place / "refs"):
            directory.mkdir(parents=True)
        (place / "refs" / "main").write_text(COMMIT)
        (snapshot / "config.json").write_text("{}")
        shards = ("model-00001-of-00002.safetensors", SHARD)
        shard_of = {f"t{number}": shard for number, shard in enumerate(shards)}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
        for number, shard in enumerate(shards):
            header = json.dumps(
                {f"t{number}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
            ).encode()
            (snapshot / shard).write_bytes(len(header).to_bytes(8, "little") + header + b"w")
        if copy == "incomplete":
            (snapshot / SHARD).unlink()
    return snapshot


def _start(
    home: Path, cases: list[tuple[str, str]], endpoint: str, at_once: int = 4, **more: str
) -> tuple[list[dict[str, Any]], str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = inherited | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*", **more}
    asked = json.dumps([(f"acme/{repository}", revision) for repository, revision in cases])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(at_once)], env=env, input=asked, capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


def _check(home: Path, kinds: Mapping[str, str], at_once: int = 4) -> None:
    """Check all copies and revisions against answers, which a message must contain."""
    cases = [(f"{copy}.{kind}", revision) for copy, kind, revision in product(COPIES, kinds, REVISIONS)]
    places = {name: _cache(home, name, name.split(".")[0]) for name in dict.fromkeys(n for n, _ in cases)}
    with raw_server.answering(_answer) as server:
        outcomes, said = _start(home, cases, server.url, at_once)
    for (name, revision), outcome in zip(cases, outcomes, strict=True):
        copy, kind = name.split(".", 1)
        has_copy = copy != "empty" and revision != "elsewhere"
        if copy == "complete" and has_copy:
            assert outcome == {"path": str(places[name])}, (name, revision, outcome)
            (notice,) = {line for line in said.splitlines() if f"acme/{name} in the local cache" in line}
            assert kinds[kind] in notice and COMMIT in notice
            continue
        assert kinds[kind] in outcome["message"] and f"acme/{name}" in outcome["message"], outcome
        local = f"lacks {SHARD}" if has_copy else "not in the local hub cache"
        status = CODES[kind][0] if kind in CODES else int(kind) if kind.isdecimal() else 0
        is_unknown = status == 404 and not has_copy
        assert outcome["code"] == (4 if status in {401, 403} else 2), (name, revision, outcome)
        assert is_unknown or local in outcome["message"]
        wanted = {401: "hf auth login", 403: "hf auth login", 404: "", 429: "wait a few minutes"}
        assert wanted.get(status, "HF_ENDPOINT") in outcome["hint"]


def test_every_status_of_the_hub(tmp_path: Path) -> None:
    named = {
        str(status): f"the hub returned HTTP status {status} {HTTPStatus(status).phrase}"
        for status in STATUSES
    }
    _check(tmp_path, named)


def test_every_refusal_that_the_hub_explains(tmp_path: Path) -> None:
    _check(tmp_path, {kind: text for kind, (_, _, text) in CODES.items()})


@pytest.mark.slow
def test_a_hub_that_answers_slowly(tmp_path: Path) -> None:
    _check(tmp_path, dict.fromkeys(SLOW, "the hub does not respond"), at_once=18)


def test_a_branch_that_moved_starts_at_the_cached_commit_if_the_download_is_refused(tmp_path: Path) -> None:
    def behave(connection: socket.socket, asked: Asked) -> None:
        if not asked.path.startswith("/api/"):
            raw_server.answer(connection, 403, {"X-Error-Code": "GatedRepo"})
        elif OTHER in asked.path or "main" in asked.path:
            raw_server.say(connection, {"id": "acme/moved", "sha": OTHER, "siblings": []})
        else:
            raw_server.say(connection, {"id": "acme/moved", "sha": COMMIT, "siblings": []})

    snapshot = _cache(tmp_path, "moved", "complete")
    with raw_server.answering(behave) as server:
        outcomes, said = _start(tmp_path, [("moved", "main")], server.url)
    assert outcomes == [{"path": str(snapshot)}] and "is gated" in said


def test_a_branch_is_recorded_for_a_start_without_the_hub(tmp_path: Path) -> None:
    files = dict.fromkeys(("config.json", "tokenizer.json"), b"{}")

    def behave(connection: socket.socket, asked: Asked) -> None:
        name = asked.path.rsplit("/", 1)[-1]
        if name in files:
            headers = {"X-Repo-Commit": OTHER, "ETag": f'"{name}"'}
            if asked.method == "HEAD":
                headers["Content-Length"] = str(len(files[name]))
            raw_server.answer(connection, 200, headers, b"" if asked.method == "HEAD" else files[name])
        else:
            raw_server.say(
                connection, {"id": "acme/new", "sha": OTHER, "siblings": [{"rfilename": "config.json"}]}
            )

    snapshot = _cache(tmp_path, "new", "complete")
    with raw_server.answering(behave) as server:
        outcomes, _ = _start(tmp_path, [("new", "main")], server.url)
    assert "no weights" in outcomes[0]["message"]
    for name in ("model.safetensors", "tokenizer.json"):
        (snapshot.parent / OTHER / name).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    outcomes, said = _start(tmp_path, [("new", "main")], "http://127.0.0.1:9")
    assert outcomes == [{"path": str(snapshot.parent / OTHER)}] and "does not respond" in said


def test_each_start_asks_the_hub_once_for_its_branch(tmp_path: Path) -> None:
    def behave(connection: socket.socket, asked: Asked) -> None:
        raw_server.say(connection, {"id": "acme/whole", "sha": COMMIT, "siblings": []})

    snapshot = _cache(tmp_path, "whole", "complete")
    with raw_server.answering(behave) as server:
        outcomes, _ = _start(tmp_path, [("whole", "main")] * 2, server.url, at_once=1)
    assert outcomes == [{"path": str(snapshot)}] * 2
    # huggingface_hub asks for more than the repository.
    asked = [one.path for one in server.asked if one.path.startswith("/api/models/")]
    assert asked == ["/api/models/acme/whole/revision/main"] * 2


def test_no_hub_is_asked_when_a_start_is_offline(tmp_path: Path) -> None:
    asked: list[str] = []
    complete = _cache(tmp_path, "whole", "complete")
    _cache(tmp_path, "part", "incomplete")
    cases = [(name, revision) for name in ("whole", "part") for revision in ("main", COMMIT)]
    with raw_server.answering(lambda _, question: asked.append(question.path)) as server:
        outcomes, _ = _start(tmp_path, cases, server.url, HF_HUB_OFFLINE="1")
    assert outcomes[:2] == [{"path": str(complete)}] * 2 and asked == []
    for outcome in outcomes[2:]:
        assert outcome["code"] == 4 and f"lacks {SHARD}" in outcome["message"]
