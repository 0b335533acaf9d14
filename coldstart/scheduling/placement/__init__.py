"""Placement: the requests that get device memory and slots in a step, for the server and the simulated engine."""

from coldstart.scheduling.placement.fresh import Fresh
from coldstart.scheduling.placement.loads import Loads
from coldstart.scheduling.placement.room import Room
from coldstart.scheduling.placement.step import Decision, Placement
from coldstart.scheduling.placement.view import Enst, KvView

__all__ = ["Decision", "Enst", "Fresh", "KvView", "Loads", "Placement", "Room"]
