"""Offline phase: run the engine once, verify the result, and publish it."""
