"""Sleep backend for vLLM that keeps one immutable copy of the weights in host memory."""

NAME = "coldstart"
"""Name of the backend in vLLM's configuration."""
