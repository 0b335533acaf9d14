"""The only room that names vLLM."""
