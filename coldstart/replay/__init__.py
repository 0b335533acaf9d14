"""Replay a trace against running servers or the simulator, and report what the requests experienced."""

from coldstart.replay.metrics import Slo, summarize
from coldstart.replay.open_loop import Replay, ReplaySettings, replay
from coldstart.replay.record import RequestRecord
from coldstart.replay.simulated import records_of

__all__ = ["Replay", "ReplaySettings", "RequestRecord", "Slo", "records_of", "replay", "summarize"]
