"""Replay a trace against running servers or the simulator, and report what the requests experienced."""

from coldstart.measure.replay.metrics import Slo, summarize
from coldstart.measure.replay.open_loop import Replay, ReplaySettings, replay
from coldstart.measure.replay.record import RequestRecord
from coldstart.measure.replay.simulated import records_of
from coldstart.measure.replay.store import RecordStore

__all__ = [
    "RecordStore",
    "Replay",
    "ReplaySettings",
    "RequestRecord",
    "Slo",
    "records_of",
    "replay",
    "summarize",
]
