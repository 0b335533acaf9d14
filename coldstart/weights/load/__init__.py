"""Loader behind the vLLM load format `coldstart`: tensor order, sources, and the tensors that a pipeline rank needs."""
