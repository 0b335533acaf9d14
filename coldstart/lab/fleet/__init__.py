"""Simulator of a fleet, and replays of traces on it."""
