"""vLLM's engine, started our way: server, template, worker, offline run."""
