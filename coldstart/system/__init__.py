"""Operating system and hardware: paths, processes, devices, versions, trust, time. It knows nothing of models or servers."""
