"""Trace replay and simulators, for experiments and to reproduce results. No server imports this package."""
