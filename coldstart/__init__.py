"""coldstart: do the cold-start work of an LLM server once, offline, and start vLLM from it."""

__version__ = "0.1.0"
