"""Our load format inside vLLM."""
