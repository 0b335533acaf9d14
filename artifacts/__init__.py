"""The bundle format and its store: no torch, no vllm, no typer."""
