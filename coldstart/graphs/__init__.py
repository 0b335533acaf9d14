"""Relocatable CUDA graphs: captured once offline, and relocated to each process at a start (MEDUSA, sections 4 to 6).

A stored graph consists of payload bytes, relocations against memory regions, and kernels stored by content. If region r
has the address B[r] in a process, the word of a relocation (region r, offset o) becomes B[r] + o. All other words are
constants. This package does not depend on vLLM; `coldstart.vllm.graphs` connects the two.

  data      tables (sealed tables in memory and on disk, words, region index), inputs, errors, api
  offline   offline (order and work of the processes): record, classify, link, prove
  online    restore, and prove for the summary
  backends  cuda/ (cuda-bindings), torch_framework (PyTorch)
"""
