"""Processor and GPUs, read without torch."""
