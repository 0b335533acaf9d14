"""The cuda-bindings backend: DriverApi on a GPU, and the same code over a fake libcuda in tests."""
