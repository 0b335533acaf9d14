"""Checkpoint and restore of processes with CRIU, and its images."""
