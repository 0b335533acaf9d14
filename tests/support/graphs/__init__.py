"""A framework and a model over the engine's own driver, whose libcuda is a double in C with host memory.

Addresses and handles differ between two models, as between two processes. Kernels run, so a wrong pointer, a lost edge or
a missing byte gives a wrong output or an error. It says nothing about a GPU's timings.
"""
