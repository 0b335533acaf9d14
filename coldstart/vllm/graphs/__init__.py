"""Everything that knows vLLM: names of its memory, the seams it is taken hold of at, record and restore in its workers."""
