"""Bundle format and store. Imports neither torch, vllm nor typer."""
