"""Load format `coldstart` for vLLM, and weights shared between workers."""
