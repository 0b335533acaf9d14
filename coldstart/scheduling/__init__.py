"""Iteration-level scheduling policies in pure Python, shared by the simulator and the vLLM adapter."""
