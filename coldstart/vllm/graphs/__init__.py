"""Record and restore the CUDA graphs of vLLM's workers."""
