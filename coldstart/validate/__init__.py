"""Check a bundle: its integrity, its fit to a machine, its start, and its responses against those of vLLM."""
