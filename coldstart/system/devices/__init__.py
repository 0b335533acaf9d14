"""Processor and accelerators, read without torch."""
