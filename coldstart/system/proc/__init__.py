"""Processes of this machine: their identity, their end, and their temporary files."""
