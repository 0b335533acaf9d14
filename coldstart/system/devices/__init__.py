"""Properties of the processor and the GPUs, found without importing torch."""
