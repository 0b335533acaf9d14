"""Processes that run vLLM's engine for coldstart: server, template, worker and offline phase."""
