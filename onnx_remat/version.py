"""The version, alone in its module so that everything may import it."""

__version__ = "0.1.0"
