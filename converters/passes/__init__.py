"""Passes: rewrites of a training step, one file each."""
