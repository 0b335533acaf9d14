"""The live scheduling campaign's parts: model, servers, workloads, one run, and the summary."""
