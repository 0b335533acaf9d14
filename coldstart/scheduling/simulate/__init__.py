"""An iteration-level model of a serving engine, driven by the same policy objects as the server."""

from coldstart.scheduling.simulate.engine import Engine, simulate
from coldstart.scheduling.simulate.settings import STRATEGIES, SimSettings
from coldstart.scheduling.simulate.state import Outcome, SimJob

__all__ = ["STRATEGIES", "Engine", "Outcome", "SimJob", "SimSettings", "simulate"]
