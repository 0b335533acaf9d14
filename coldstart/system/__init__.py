"""Operating system and hardware: paths, processes, devices, versions, trust and time. Models and servers are out of scope."""
