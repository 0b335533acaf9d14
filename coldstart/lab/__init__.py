"""Trace replay and simulators, for experiments and reproduction of results. No server imports this package."""
