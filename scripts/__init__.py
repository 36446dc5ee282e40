"""Measurements and tables; run each as ``python -m scripts.NAME``."""
