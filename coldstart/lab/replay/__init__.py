"""Replay of a trace against running servers or the simulator, with a report of the requests' latencies."""

from coldstart.lab.replay.metrics import Slo, summarize
from coldstart.lab.replay.open_loop import Replay, ReplaySettings, replay
from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.replay.store import RecordStore

__all__ = [
    "RecordStore",
    "Replay",
    "ReplaySettings",
    "RequestRecord",
    "Slo",
    "replay",
    "summarize",
]
