"""Validate a bundle: its integrity, whether it fits a machine, its start, and its responses compared with vLLM's."""
