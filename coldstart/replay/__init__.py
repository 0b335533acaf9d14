"""Replay a trace against running servers or the simulator, and report what the requests experienced."""

from coldstart.replay.metrics import Slo, summarize
from coldstart.replay.open_loop import Replay, ReplaySettings, replay
from coldstart.replay.record import RequestRecord
from coldstart.replay.simulated import records_of
from coldstart.replay.store import RecordStore

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
