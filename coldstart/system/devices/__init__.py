"""The processor and the accelerators, read without torch."""
