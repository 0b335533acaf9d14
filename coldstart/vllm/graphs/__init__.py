"""Everything that knows vLLM: names of its memory, the integration points, record and restore in its workers."""
