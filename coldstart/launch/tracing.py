"""Export the trace of a start over OTLP (OpenTelemetry): one span for the start and one for each stage of its timeline.

Invariant: a trace changes no start. The export begins once the server is ready, in its own thread; a failure is one warning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import coldstart
from coldstart.contract import environment, fallback
from coldstart.system import secrets

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from coldstart.launch.ladder import StartedServer
    from coldstart.system.timeline import Timeline

Warn = Callable[[str], None]


def is_enabled(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment names a collector of traces and disables neither OpenTelemetry nor its traces."""
    disabled = environment.OTEL_SDK_DISABLED.read(variables).strip().lower() == "true"
    exporter = environment.OTEL_TRACES_EXPORTER.read(variables).strip()
    return bool(_endpoint(variables)) and not disabled and exporter in ("", "otlp")


def _endpoint(variables: Mapping[str, str] | None = None) -> str:
    own = environment.OTEL_EXPORTER_OTLP_TRACES_ENDPOINT.read(variables)
    return own or environment.OTEL_EXPORTER_OTLP_ENDPOINT.read(variables)


def export_in_background(
    started: StartedServer, timeline: Timeline, model: str, warn: Warn, *, parent: bool
) -> Thread | None:
    """Export the trace of a start in a thread that ends with the process.

    Args:
        started: The server that is ready.
        timeline: Spans of its start; it is not changed afterwards.
        model: Name of its model.
        warn: Receives one line if the trace cannot be exported.
        parent: Whether TRACEPARENT names the span in which the start happened.

    Returns:
        The thread; None without a collector, or if no thread can be created.
    """
    if not is_enabled():
        return None
    arguments = (started, timeline, model, warn, parent)
    thread = Thread(target=_export, args=arguments, name="trace", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no further thread may be created
        warn(f"the trace of this start was not sent: {error}")
        return None
    return thread


def _export(started: StartedServer, timeline: Timeline, model: str, warn: Warn, parent: bool) -> None:
    try:
        with _messages() as said:
            failure = _send(_make_spans(started, timeline, model, parent), said)
    except ModuleNotFoundError as error:
        failure = f"{error.name} is not installed (hint: coldstart install otel)"
    except Exception as error:  # noqa: BLE001 - the server is ready, and no error of an exporter may change that
        failure = f"{type(error).__name__}: {error}"
    if failure:
        reason = " ".join(secrets.text(failure).split())
        warn(f"the trace of this start was not sent to {secrets.text(_endpoint())}: {reason}")


@contextmanager
def _messages() -> Iterator[list[str]]:
    """Collect the messages that OpenTelemetry would write to standard error."""
    import logging

    said: list[str] = []
    logger = logging.getLogger("opentelemetry")
    collector = logging.Handler(logging.WARNING)
    collector.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield said
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagated


def _send(spans: tuple[ReadableSpan, ...], said: list[str]) -> str:
    """Send the spans; return why that failed, or an empty text. OTEL_EXPORTER_OTLP_TIMEOUT limits the time."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    # A parent that is not sampled leaves no span.
    if not spans or OTLPSpanExporter().export(spans) is SpanExportResult.SUCCESS:
        return ""
    return said[-1] if said else "the exporter gives no reason"


def _make_spans(
    started: StartedServer, timeline: Timeline, model: str, parent: bool
) -> tuple[ReadableSpan, ...]:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from coldstart.system.recording import process_started

    # All spans are on CLOCK_MONOTONIC. One difference for all of them retains their distances.
    wall_ns = time.time_ns() - time.monotonic_ns()

    def nanoseconds(monotonic_s: float) -> int:
        return wall_ns + round(monotonic_s * 1e9)

    own = {"service.name": "coldstart", "service.version": coldstart.__version__}
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = provider.get_tracer("coldstart", coldstart.__version__)
    given = {"traceparent": environment.TRACEPARENT.read()} if parent else {}
    context = TraceContextTextMapPropagator().extract(given)
    # A file of events that the environment names has earlier starts too.
    began_s = process_started()
    spans = [span for span in timeline.spans if span.end_s > began_s]
    root = tracer.start_span(
        "start server",
        context,
        attributes=_describe(started, model),
        start_time=nanoseconds(min([began_s, *(span.start_s for span in spans)])),
    )
    inside = set_span_in_context(root, context)
    for span in spans:
        place: dict[str, Any] = {"coldstart.track": span.track, "process.pid": span.pid}
        made = tracer.start_span(span.name, inside, attributes=place, start_time=nanoseconds(span.start_s))
        made.end(nanoseconds(span.end_s))
    root.end(nanoseconds(started.began + started.running.ready_s))
    return memory.get_finished_spans()


def _describe(started: StartedServer, model: str) -> dict[str, Any]:
    fallbacks = fallback.decode(started.document()["fallbacks"])
    return {
        "coldstart.model": model,
        "coldstart.mode": started.mode,
        "coldstart.fallback.stages": [one.stage for one in fallbacks],
        "coldstart.fallback.reasons": [secrets.text(one.reason) for one in fallbacks],
    }
