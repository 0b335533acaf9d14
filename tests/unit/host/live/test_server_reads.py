"""Routes of a running server that the host passes on: its metrics, and /upstream."""

import asyncio
import gc
import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_upstream import TWO, Stage, staged

from coldstart.host.live import host_routes
from coldstart.host.live.access_control import READ_PATHS
from coldstart.host.live.log import Log, capture_loggers
from coldstart.host.live.server_log import BLOCK, ServerLog

METRICS = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
"""
READ = "coldstart_host_server_metrics_read"


async def _samples(stage: Stage) -> dict[tuple[str, str | None], float]:
    async with stage.client.get(stage.url + "/metrics") as answer:
        assert answer.status == 200 and answer.content_type == "text/plain"
        text = await answer.text()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(one.name, one.labels.get("model")): one.value for family in families for one in family.samples}


async def test_metrics_do_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    async with staged(tmp_path, memory=20) as stage:
        stage.servers.metrics = METRICS
        stage.servers.hung = {"b"}
        for name in "ab":
            await stage.ask(model=name, prompt=1)
        began = time.monotonic()
        found = await _samples(stage)
        assert time.monotonic() - began < host_routes.METRICS_S + 5
        assert found["vllm:num_requests_running", "a"] == 2.0
        assert (found[READ, "a"], found[READ, "b"]) == (1.0, 0.0)


async def test_upstream_reads_safe_routes_of_a_running_server(tmp_path: Path) -> None:
    models = {"org/a": {**TWO["a"], "args": ["--api-key", "own"]}, "b": TWO["b"]}
    async with staged(tmp_path, models) as stage:
        status, said = await stage.get("/upstream/org/a/version")
        assert status == 404 and "is stopped" in said["error"]["message"] and not stage.servers.begun
        assert (await stage.ask(model="org/a", prompt=1))[0] == 200
        for name in ("org/a", "alpha"):
            found = await stage.get(f"/upstream/{name}/version")
            assert found == (200, {"version": "fake", "key": "Bearer own"})
        asked = list(stage.servers.begun[0].paths)
        for path in ("sleep", "wake_up", "v1/load_lora_adapter", "server_info", "v1/models"):
            assert (await stage.get(f"/upstream/org/a/{path}"))[0] == 404
            assert (await stage.send(f"/upstream/org/a/{path}"))[0] == 405
        assert (await stage.get("/upstream/nobody/version"))[0] == 404
        assert (await stage.get("/upstream/version"))[0] == 404
        assert stage.servers.begun[0].paths == asked


async def test_reads_without_a_model_reach_the_default_or_the_only_model(tmp_path: Path) -> None:
    async def work(models: dict[str, Any], status: int, **limits: Any) -> None:
        async with staged(tmp_path, models, **limits) as stage:
            assert (await stage.get("/version"))[0] == 404 and not stage.servers.begun
            for name in models:
                assert (await stage.ask(model=name, prompt=1))[0] == 200
            found, said = await stage.get("/version")
            assert found == status
            assert ("does not specify a model" if status == 404 else "Bearer of-a") in str(said)
            # The server of the double knows /version only and answers others itself.
            for path in READ_PATHS:
                assert "unknown path" not in str((await stage.get(path))[1]), path
                assert (await stage.send(path))[0] == 405

    own = {name: {**TWO[name], "args": ["--api-key", f"of-{name}"]} for name in "ab"}
    await work({"a": own["a"]}, 200)
    await work(own, 404, memory=20)


def test_samples_of_a_family_stand_together_and_name_their_model() -> None:
    text = '# TYPE up gauge\nup{y="} 1"} 2.0\n# TYPE down gauge\ndown 1.0\n'
    merged = host_routes.merge_metrics("# TYPE own gauge\nown 1.0\n", [('q"\\\n', text), ("b", text)])
    families = {one.name: one.samples for one in text_string_to_metric_families(merged)}
    assert [(one.labels, one.value) for one in families["up"]] == [
        ({"model": 'q"\\\n', "y": "} 1"}, 2.0),
        ({"model": "b", "y": "} 1"}, 2.0),
    ]
    assert [one.labels["model"] for one in families["down"]] == ['q"\\\n', "b"]
    assert merged.count("# TYPE") == len(families) == 3


def test_other_comments_and_separators_within_a_line_change_no_sample() -> None:
    merged = host_routes.merge_metrics("", [("m", '# TYPE up gauge\n# EOF\nup{y="a\u2028b"} 2.0\n')])
    (family,) = text_string_to_metric_families(merged)
    assert [(one.labels, one.value) for one in family.samples] == [({"model": "m", "y": "a\u2028b"}, 2.0)]


WRITER = """
import sys
for number in range(int(sys.argv[1])):
    print(f"line {number:06d}", flush=True)
    if number % 1000 == 999:
        sys.stdin.readline()
"""


def test_a_log_that_another_process_writes_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    with log.path.open("ab") as sink, subprocess.Popen(
        [sys.executable, "-c", WRITER, "10000"], stdin=subprocess.PIPE, stdout=sink, text=True
    ) as writer:  # fmt: skip
        assert writer.stdin is not None
        for round_ in range(1, 11):
            while not log.path.read_bytes().endswith(b"line %06d\n" % (round_ * 1000 - 1)):
                time.sleep(0.005)
            log.truncate(5000)
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 12_000 + 5000
            print(file=writer.stdin, flush=True)
    lines = log.tail(4800).splitlines()
    assert lines == [f"line {number:06d}" for number in range(10_000 - len(lines), 10_000)]
    assert len(lines) > 300
    log.remove()
    assert list(tmp_path.iterdir()) == []


def test_small_or_missing_log_is_not_changed(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    log.truncate()
    assert (log.tail(100), log.find_error()) == ("", "")
    log.path.write_text("INFO fine\nValueError: too little memory\n")
    log.truncate()
    assert not log.before.exists() and log.find_error() == "ValueError: too little memory"
    log.remove()
    log.remove()


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    log = ServerLog(tmp_path / "7.log")
    log.path.write_text("token hf_abcdefghijklmnop given\n")
    assert "hf_abcdefghijklmnop" not in log.tail(100)


async def test_followed_log_goes_on_after_it_was_truncated_and_deleted(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "7.log")
    log.path.write_text("first line\nsecond\nthird\n")
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    lines = log.follow(10, ended)
    with log.path.open("a") as sink:
        assert await anext(lines) == "third\n"
        sink.write("x" * 2 * BLOCK)
        sink.flush()
        # A line without an end is not retained beyond a block.
        assert (await anext(lines)).startswith("xxx")
        log.truncate(10)
        sink.write("after\n")
        sink.flush()
        assert (await anext(lines)).endswith("after\n")
        log.remove()
        sink.write("last")
        sink.flush()
        ended.set_result("")
        assert [line async for line in lines] == ["last"]
    assert [line async for line in log.follow(10, ended)] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_write_formats_text_when_the_output_is_a_terminal() -> None:
    sink = Terminal()
    Log(sink).write(
        "start", model="m", seconds=1.23456, mode=None, reason="no\x1b[31m", url="http://me:geheim@host/x"
    )
    time, line = sink.getvalue().split(" ", 1)
    assert len(time) == 8 and line.startswith("start model=m seconds=1.23 reason=")
    assert "\x1b" not in line and "geheim" not in line and line.count("\n") == 1


def test_log_is_json_without_secrets_and_never_fails() -> None:
    sink = io.StringIO()
    Log(sink).write("start", model="m", mode=None, url="http://me:geheim@host/x")
    line = json.loads(sink.getvalue())
    assert (line["event"], line["model"]) == ("start", "m") and "mode" not in line
    assert "geheim" not in sink.getvalue() and line["ts"].endswith("+00:00")
    sink.close()
    Log(sink).write("start", model="m")


def test_loggers_of_libraries_write_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    # A task that an earlier test has left reports itself when it is collected.
    gc.collect()
    sink = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    uvicorn, asyncio = logging.getLogger("uvicorn.error"), logging.getLogger("asyncio")
    with capture_loggers(Log(sink)):
        try:
            raise RuntimeError("two\nlines of http://me:geheim@host/x")
        except RuntimeError:
            uvicorn.exception("Exception in ASGI application\n")
        asyncio.error("%s was never retrieved", "Task")
        asyncio.error("%d", "no number")
    uvicorn.error("after the block")
    lines = [json.loads(line) for line in sink.getvalue().splitlines()]
    texts = [line["text"] for line in lines]
    assert texts == ["Exception in ASGI application", "Task was never retrieved", "%d"]
    assert lines[0]["logger"] == "uvicorn.error" and lines[0]["error"].startswith("RuntimeError: two\nlines")
    assert "geheim" not in sink.getvalue()
