"""Checkpoint and restore of processes by CRIU, and the images that it writes."""
