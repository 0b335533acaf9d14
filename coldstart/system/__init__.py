"""The operating system and the hardware: paths, processes, devices, versions, trust and time. Knows no model and no server."""
