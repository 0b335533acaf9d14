"""An iteration-level model of a serving engine, driven by the same policy objects as the server."""

from coldstart.simulate.engine import Engine, simulate
from coldstart.simulate.settings import STRATEGIES, SimSettings
from coldstart.simulate.state import Outcome, SimJob

__all__ = ["STRATEGIES", "Engine", "Outcome", "SimJob", "SimSettings", "simulate"]
