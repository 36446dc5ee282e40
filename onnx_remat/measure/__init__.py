"""Measured runs in fresh processes, seconds per op, and the checks of a written file."""
