"""The live fleet on Ray: one process is both gateway and controller, and one actor runs on each server."""
