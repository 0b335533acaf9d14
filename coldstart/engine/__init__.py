"""The engine: everything that starts, feeds or imitates a vLLM server lives here."""
