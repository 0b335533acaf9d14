"""Access to the CUDA driver through cuda-bindings. Tests use a fake libcuda."""
