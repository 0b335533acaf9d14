"""Resolve the name of a model to its files, its identity, the key of its bundle, and that bundle."""
