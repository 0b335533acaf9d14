"""Processes of this machine: what they are, how they end, and what they leave."""
