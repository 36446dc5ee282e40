"""Other processes, and compiled code: functions that they call, the worker for native libraries, numba's cache."""
