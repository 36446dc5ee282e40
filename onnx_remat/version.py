"""The version, in a module without imports so that every module may import it."""

__version__ = "0.1.0"
