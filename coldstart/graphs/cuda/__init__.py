"""DriverApi over cuda-bindings, on a GPU or with a fake libcuda in tests."""
