"""Check a bundle: its integrity, its fit to a machine, its start, and its answers against those of vLLM."""
