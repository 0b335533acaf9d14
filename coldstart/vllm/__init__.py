"""Integration with vLLM; no other package names vLLM modules."""
