"""KV of running requests, moved between vLLM servers."""
