"""This machine: its paths, processes, devices, versions, trust and time. Knows no model and no server."""
