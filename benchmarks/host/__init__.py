"""The parts of `host_live.py`."""
