"""Validate a bundle: its integrity, its fit to a machine, its start, and its responses compared with vLLM's."""
