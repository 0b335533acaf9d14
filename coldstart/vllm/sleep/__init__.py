"""Sleep backend for vLLM that keeps one immutable copy of the weights in host memory."""
