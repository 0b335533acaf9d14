"""vLLM's engine with coldstart's start: server, template, worker and offline phase."""
