"""CUDA graphs as relocatable objects: captured once offline, restored by linking at every start.

A captured graph is stored as payload bytes, relocations against named memory regions, and kernels by value.
In each process with region bases B, the word of a relocation (region r, offset o) equals B[r] + o. Every other word is a
constant (MEDUSA, sections 4 to 6, generalised). This package does not name vLLM; `coldstart.vllm.graphs` connects it.

  representation  tables, table_files (on disk, sealed), overview, bundles (in a bundle store), errors, api (the protocols)
  offline         offline (order of processes), rounds (work of one process): capture, snapshot, trace, windows, intervals,
                  sides, classify, combine, builder, contents, live, elf; inputs and gate (the proof)
  online          online (order, canary): restore, link, kernels, rebuild; inputs
  backends        cuda/ (DriverApi over cuda-bindings), torch_framework (FrameworkApi over PyTorch)
"""
