"""Format and store of bundles of artifacts for faster vLLM starts. Imports neither torch, vllm nor typer."""
