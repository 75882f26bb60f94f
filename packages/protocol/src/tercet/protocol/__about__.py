"""The version of this package; the wire has its own."""

__version__ = "0.1.0"
