"""Real starts and stops by the hundred; `__main__` says which."""
