"""Subcommands. Each one parses its arguments, calls the engine, and renders the result. They contain no other logic."""
