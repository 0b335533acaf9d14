"""Relocatable CUDA graphs: captured once offline, restored by relocation at every start (MEDUSA, sections 4 to 6).

A captured graph is stored as payload bytes, relocations against memory regions, and kernels by value. In each process
with region bases B, the word of a relocation (region r, offset o) equals B[r] + o. Every other word is a constant. This
package is independent of vLLM; `coldstart.vllm.graphs` connects the two.

  data      tables (in memory and on disk, sealed; words and intervals), inputs, errors, api
  offline   offline (order of processes, work of each): record, classify, link, prove
  online    restore, and prove for the summary
  backends  cuda/ (cuda-bindings), torch_framework (PyTorch)
"""
