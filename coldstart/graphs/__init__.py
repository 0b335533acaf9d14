"""Relocatable CUDA graphs: captured once offline and relocated in each process at start (MEDUSA, sections 4 to 6).

A stored graph consists of payload bytes, relocations against memory regions, and kernels that are stored by content. If
region r has the address B[r] in a process, the word of a relocation (region r, offset o) becomes B[r] + o. All other
words are constants. This package does not depend on vLLM; `coldstart.vllm.graphs` connects the two.

  data      tables (sealed tables in memory and on disk, words, region index), inputs, errors, api
  offline   offline (runs the processes and defines their tasks), record, classify, link, prove
  online    restore, and prove for the summary of a bundle
  backends  cuda/ (cuda-bindings), torch_framework (PyTorch)
"""
