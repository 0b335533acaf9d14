"""The trace of a start, as a real collector receives it. The server is a fake engine."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from coldstart.commands import _serving
from coldstart.commands._options import Common
from coldstart.commands._output import Output
from support.otlp_collector import Collector, collecting
from support.waiting import wait_until

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.host.live import starter
from coldstart.launch import planning, tracing
from coldstart.launch.request import ServeRequest
from coldstart.models.inspection import Lookup
from coldstart.system.ipc import json_lines

FakeEngine = Callable[[str], None]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PLAN = LaunchPlan(["measures", "--port", "9"])


@pytest.fixture(autouse=True)
def variables(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Recordings lie in a directory of the machine, in which other tests count them. pytest has chosen its own directory before.
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{SPAN}-01")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv(ENDPOINT, made.url)
        yield made


class Stderr:
    """What was written to standard error. Reading takes nothing away: capfd loses what another thread writes meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def has(self, text: str) -> bool:
        return text in self.text


@contextmanager
def recorded_stderr(path: Path) -> Iterator[Stderr]:
    """Record in the block; a fixture cannot, because pytest sets sys.stderr again when the test begins."""
    with path.open("w", buffering=1, encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield Stderr(path)


@pytest.fixture
def serve(lookup: Lookup, fake_engine: FakeEngine, handlers: None) -> Callable[[Callable[[], object]], None]:
    """Return serve(wait), which runs `serve` and ends its server once `wait` returns."""
    fake_engine("measures")

    def run(wait: Callable[[], object]) -> None:
        enders: list[Thread] = []

        def end(pid: int) -> None:
            wait()
            os.kill(pid, signal.SIGTERM)

        def announce(report: dict[str, Any], _: str) -> None:
            enders.append(Thread(target=end, args=(report["pid"],)))
            enders[0].start()

        common = Common(Output(), False, lookup.cache, Arguments())
        request = ServeRequest(lookup, mode="fresh", ready_timeout=20)
        assert _serving.run(common, request, PLAN, announce) == 1
        enders[0].join()

    return run


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value for one in span.attributes}


def listed(value: Any) -> list[str]:
    return [one.string_value for one in value.array_value.values]


def test_serve_sends_a_span_for_the_start_and_for_each_stage(
    serve: Callable[[Callable[[], object]], None], collector: Collector
) -> None:
    before = time.time_ns()
    serve(lambda: collector.asked.wait(60))
    ((path, request),) = collector.requests
    assert path == "/v1/traces"
    service = attributes(request.resource_spans[0].resource)["service.name"].string_value
    assert service == "coldstart"
    spans = {span.name: span for span in collector.spans()}
    assert set(spans) == {"start server", "coldstart", "load weights"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    root, load = spans["start server"], spans["load weights"]
    assert root.parent_span_id.hex() == SPAN
    assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
    # The test's own process is the command, and began before the test.
    assert root.start_time_unix_nano < before < root.end_time_unix_nano < time.time_ns()
    assert before < load.start_time_unix_nano < load.end_time_unix_nano < root.end_time_unix_nano
    assert load.end_time_unix_nano - load.start_time_unix_nano >= 50_000_000
    given = attributes(root)
    assert given["coldstart.model"].string_value == "tiny" and given["coldstart.mode"].string_value == "fresh"
    fallbacks = [listed(given[f"coldstart.fallback.{name}"]) for name in ("stages", "reasons")]
    assert fallbacks == [["kv"], ["no room"]]


def test_host_sends_a_trace_of_its_own_for_each_start(
    lookup: Lookup,
    fake_engine: FakeEngine,
    collector: Collector,
    handlers: None,
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_engine("measures")
    request = ServeRequest(lookup, mode="fresh", ready_timeout=20)
    monkeypatch.setattr(starter, "_request", lambda *_: request)
    monkeypatch.setattr(planning, "plan", lambda _: PLAN)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "models")
    near, far = map(json_lines.Channel, pair)
    ready: dict[str, Any] = {}

    def end() -> None:
        for message in far.replies():
            ready.update(message.get("ready", {}))
            if ready:
                break
        collector.asked.wait(60)
        os.kill(ready["pid"], signal.SIGTERM)

    ender = Thread(target=end)
    ender.start()
    starter.supervise({"template": None, "listen": [], "served": ["a"]}, near)
    ender.join()
    (root,) = [span for span in collector.spans() if span.name == "start server"]
    assert root.parent_span_id == b"" and root.trace_id.hex() != TRACE
    (resource,) = collector.requests[0][1].resource_spans
    assert attributes(resource.resource)["service.name"].string_value == "models"


def test_a_collector_that_never_answers_does_not_delay_the_server(
    serve: Callable[[Callable[[], object]], None], collector: Collector
) -> None:
    collector.answers.clear()
    serve(lambda: collector.asked.wait(60))
    assert not collector.answers.is_set() and len(collector.requests) == 1


def test_a_refused_trace_is_one_warning(
    serve: Callable[[Callable[[], object]], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with collecting(status=400) as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        warning = f"warning: the trace of this start was not sent to {collector.url}: "
        with recorded_stderr(tmp_path / "stderr") as stderr:
            serve(lambda: wait_until(lambda: stderr.has(warning)))
    lines = [line for line in stderr.text.splitlines() if "trace" in line or "export" in line.lower()]
    assert len(lines) == 1 and "400" in lines[0]


def test_a_missing_extra_is_one_warning(
    serve: Callable[[Callable[[], object]], None],
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with recorded_stderr(tmp_path / "stderr") as stderr:
        serve(lambda: wait_until(lambda: stderr.has("hint: coldstart install otel")))
    assert "opentelemetry.sdk.resources is not installed" in stderr.text and not collector.requests


def test_a_server_continues_when_no_thread_can_be_created(
    serve: Callable[[Callable[[], object]], None],
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    real = tracing.Thread
    monkeypatch.setattr(tracing, "Thread", type("Refused", (real,), {"start": refuse}))
    serve(lambda: None)
    assert "warning: the trace of this start was not sent: can't start" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({}, False),
        ({ENDPOINT: "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({ENDPOINT: "http://x:4318", "OTEL_SDK_DISABLED": "True"}, False),
        ({ENDPOINT: "http://x:4318", "OTEL_SDK_DISABLED": "false"}, True),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://x:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://x:4318", "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_tracing_is_enabled_when_a_collector_is_named(given: dict[str, str], enabled: bool) -> None:
    assert tracing.is_enabled(given) is enabled
