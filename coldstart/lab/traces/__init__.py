"""Request traces: readers, arrival processes and transformations, all streaming (constant memory)."""

from coldstart.lab.traces.readers import FORMATS, read_trace
from coldstart.lab.traces.request import BadRow, TraceError, TraceReport, TraceRequest

__all__ = ["FORMATS", "BadRow", "TraceError", "TraceReport", "TraceRequest", "read_trace"]
