"""Load format `coldstart` for vLLM, and sharing of weights between workers."""
