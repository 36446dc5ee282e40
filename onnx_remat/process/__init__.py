"""Other processes, and compiled code: the worker for native libraries, numba's cache."""
