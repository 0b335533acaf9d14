"""CUDA graphs as relocatable objects: captured once offline, restored by linking at every start.

A captured graph is payload bytes + relocations against named memory regions + kernels by value; for every
process with region bases B the word behind a relocation (region r, offset o) equals B[r] + o, and every other
word is a constant.  (MEDUSA, sections 4 to 6, generalised.)

  what it is     tables, table_files (on disk, sealed), overview, bundles (in a bundle store), errors, api (the two protocols)
  offline        offline (which processes), rounds (what each does): capture, snapshot, trace, windows, intervals, sides,
                 classify, combine, builder, contents, references, elf, compare; inputs and gate (the proof)
  online         online (order, canary): restore, link, kernels, rebuild; inputs
  three drivers  cuda/ (cuda-bindings; a C fake in tests/support/fake_cuda), sim/ (a simulator); torch_framework
  vLLM           entry (what vLLM loads), vllm/
"""
