"""Operating system and hardware: paths, processes, devices, versions, trust, time. Knows nothing of models and servers."""
