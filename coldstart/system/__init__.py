"""Operating system and hardware: paths, processes, devices, versions, trust, time. Knows no model and no server."""
