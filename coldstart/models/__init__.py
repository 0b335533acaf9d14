"""Resolve a model name to its files, its identity, its bundle key, and the bundle."""
