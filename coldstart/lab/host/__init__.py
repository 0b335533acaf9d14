"""Simulator of a model host, replays of traces on it, and eviction policies that know the future."""
