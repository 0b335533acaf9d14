"""Weights into vLLM as they arrive: the load format `coldstart` and what decides which bytes a rank needs."""
