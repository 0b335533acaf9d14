"""Integration with vLLM. No other package of coldstart imports vLLM's modules."""
