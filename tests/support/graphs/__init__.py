"""A driver and a framework in Python whose addresses and handles differ in every process.

It executes real kernels on host memory, so a wrong pointer, a lost edge or a missing byte gives a wrong
output or a fault.  It says nothing about a GPU's timings or about undocumented driver behaviour.
"""
