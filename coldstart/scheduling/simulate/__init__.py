"""An iteration-level model of vLLM's engine, driven by the same policy, placement and settings as the server."""

from coldstart.scheduling.simulate.engine import Engine, simulate
from coldstart.scheduling.simulate.settings import COPIES, SimSettings
from coldstart.scheduling.simulate.state import Arrival, Outcome, SimJob

__all__ = ["COPIES", "Arrival", "Engine", "Outcome", "SimJob", "SimSettings", "simulate"]
