"""Checkpoint and restore of processes with CRIU, and the resulting images."""
