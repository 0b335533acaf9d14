"""CUDA graphs in vLLM's workers: names of its memory, integration points, recording and restoring."""
