"""Integration with vLLM. No other package names vLLM."""
