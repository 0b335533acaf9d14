"""CUDA graphs as relocatable objects: captured once offline, restored by linking at every start.

A captured graph is payload bytes + relocations against named memory regions + kernels by value; for every
process with region bases B the word behind a relocation (region r, offset o) equals B[r] + o, and every other
word is a constant.  (MEDUSA, sections 4 to 6, generalised.)
"""
