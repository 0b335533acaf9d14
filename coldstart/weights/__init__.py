"""Weights plan of a checkpoint, the prefetcher that fetches its bytes, and the loader that passes them to vLLM."""
