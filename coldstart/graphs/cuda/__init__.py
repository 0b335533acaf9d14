"""The CUDA driver through cuda-bindings; tests use a fake libcuda."""
