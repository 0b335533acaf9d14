"""An iteration-level model of vLLM's engine, driven by the same policy, placement and settings as the server."""

from coldstart.lab.scheduling.engine import Engine, simulate
from coldstart.lab.scheduling.settings import COPIES, SimSettings
from coldstart.lab.scheduling.state import Arrival, Outcome, SimJob

__all__ = ["COPIES", "Arrival", "Engine", "Outcome", "SimJob", "SimSettings", "simulate"]
