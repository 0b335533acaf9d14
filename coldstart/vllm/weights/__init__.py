"""Load format `coldstart` inside vLLM."""
