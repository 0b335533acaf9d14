"""Offline phase: run the engine once, prove the result, publish it."""
