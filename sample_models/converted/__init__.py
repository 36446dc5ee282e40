"""Training steps of well-known nets at small size, written by the converters."""
