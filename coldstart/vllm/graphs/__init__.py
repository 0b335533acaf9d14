"""CUDA graphs in vLLM's workers: names of memory, hooks into vLLM, recording and restoring."""
