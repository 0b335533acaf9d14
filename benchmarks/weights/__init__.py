"""The weight benchmarks' parts: a checkpoint, one load in vLLM, what hardware gives, a node with a prefetcher, reports."""
