"""Integration with vLLM; no other package refers to vLLM's modules."""
