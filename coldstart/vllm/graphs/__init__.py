"""CUDA graphs in vLLM's workers: names of memory, integration points, recording and restoring."""
